"""`python -m finetune_trainer` with a stand-in for a rank's work: CONFIG ENTRY.

ENTRY is a name in `rank_entries`, or MODULE:NAME.

A program of its own, as the stand-ins import torch, which takes seconds and no main process needs.
"""

import sys

from finetune_trainer.launch.main import main

if __name__ == "__main__":
    name = sys.argv[-1]
    main(sys.argv[1:-1], entry=name if ":" in name else f"support.launch.rank_entries:{name}")

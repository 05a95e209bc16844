"""`python -m finetune_trainer` with a stand-in from `rank_entries` for a rank's work: CONFIG ENTRY.

A program of its own, as the stand-ins import torch, which takes seconds and no main process needs.
"""

import sys

from finetune_trainer.launch.main import main

if __name__ == "__main__":
    main(sys.argv[1:-1], entry=f"rank_entries:{sys.argv[-1]}")

"""`python -m finetune_trainer CONFIG` with a watched rank: CONFIG ENTRY.

A program of its own, as what it starts imports torch, and no main process needs that.
"""

import sys

from finetune_trainer.launch.main import main

if __name__ == "__main__":
    main(sys.argv[1:2], entry=f"gpu_bench.entry:{sys.argv[2]}")

"""The entry of an Azure ML job with a stand-in from `rank_entries` for a rank's work.

Arguments: NAME=PATH... STAND_IN.
"""

import sys

from finetune_trainer.launch.azureml.entry import main

if __name__ == "__main__":
    main(sys.argv[1:-1], entry=f"support.launch.rank_entries:{sys.argv[-1]}")

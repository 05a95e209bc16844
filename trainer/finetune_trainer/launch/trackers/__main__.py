"""Run `python -P -m finetune_trainer.launch.trackers CONFIG OFFSET FOLDER` (see `process`)."""

import sys

if __name__ == "__main__":
    from finetune_trainer.launch.trackers.runner import main

    main(sys.argv[1:])

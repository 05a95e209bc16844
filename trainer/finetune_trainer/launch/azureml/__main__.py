"""Run `python -P -m finetune_trainer.launch.azureml NAME=PATH...`; handle signals first."""

import sys

from finetune_trainer import first_signal

if __name__ == "__main__":
    first_signal.listen()
    from finetune_trainer import safe_path

    safe_path.remove_current_folder()
    from finetune_trainer.launch.azureml.entry import main

    main(sys.argv[1:])

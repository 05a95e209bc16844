"""Run `python -m finetune_trainer CONFIG`: handle signals first, then import everything else."""

import sys

from finetune_trainer import first_signal

if __name__ == "__main__":
    first_signal.listen()
    from finetune_trainer import safe_path

    safe_path.remove_current_folder()
    from finetune_trainer.launch.main import main

    main(sys.argv[1:])

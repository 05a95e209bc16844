"""`python -m finetune_trainer CONFIG`: listen to signals, and only then import anything else."""

import sys

from finetune_trainer import first_signal

if __name__ == "__main__":
    first_signal.listen()
    from finetune_trainer import safe_path

    safe_path.leave_out_the_current_folder()
    from finetune_trainer.launch.main import main

    main(sys.argv[1:])

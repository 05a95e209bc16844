"""`python -m finetune_operator` is `ftctl`."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and os.path.isdir(sys.path[0]) and sys.path[0] == os.getcwd():
        del sys.path[0]  # a yaml.py beside a manifest must not be imported
    from finetune_operator.cli.app import main

    main()

"""Keep Python from importing modules in the current folder, which belongs to the user.

`__main__` calls it before other imports, because other launchers start the trainer without `-P`.
Python processes started by the trainer get `-P`, and the environment passes it on to their
children.
"""

import os
import sys


def remove_current_folder() -> None:
    """Undo the effect of `python -m` without `-P`, here and for all child processes."""
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        here = os.getcwd()
    except FileNotFoundError:  # deleted meanwhile
        here = ""
    if not sys.flags.safe_path and sys.path[0] == here:
        del sys.path[0]

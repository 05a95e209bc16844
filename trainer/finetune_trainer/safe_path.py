"""Keep Python from importing what lies in the current folder, which is the user's and none of ours.

`__main__` calls it before it imports anything else: another launcher starts us without `-P`. Where
we start Python ourselves it is given `-P`, and the environment says so to what it starts in turn.
"""

import os
import sys


def leave_out_the_current_folder() -> None:
    """Undo what `python -m` without `-P` has done, here and for every process to come."""
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        here = os.getcwd()
    except FileNotFoundError:  # deleted meanwhile
        here = ""
    if not sys.flags.safe_path and sys.path[0] == here:
        del sys.path[0]

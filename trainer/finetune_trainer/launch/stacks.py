"""Show a rank's stacks to its supervisor, and detect stacks written by the timer in C.

A rank that holds the interpreter lock for too long is ended by a timer of `faulthandler`, which
leaves no report and exits with 1. Only the stack file distinguishes that from other errors. The
watchdog in `worker` writes it, and `supervisor` finds it through a link beside the reports.
"""

from pathlib import Path

_HEAD_OF_TIMER = b"Timeout ("  # first bytes of `faulthandler.dump_traceback_later`


def stacks_file(rank: int) -> str:
    """Return the name of the file of a rank's stacks."""
    return f"rank-{rank}.stacks.txt"


def stacks_of_timer(reports: Path, rank: int) -> Path | None:
    """Return the stack file of a rank that was ended by its timer; None for any other end."""
    link = reports / stacks_file(rank)
    try:
        return link.readlink() if _HEAD_OF_TIMER in link.read_bytes() else None
    except FileNotFoundError:
        return None

"""Locate the stack files of a node's ranks, and detect stacks written by the timer in C.

A rank that holds the interpreter lock for too long is ended by a timer of `faulthandler`, which
leaves no report and exits with 1. Only the stack file distinguishes that from other errors. The
watchdog in `worker` writes it, and `supervisor` reads it.
"""

from collections.abc import Iterable
from pathlib import Path

_HEAD_OF_TIMER = b"Timeout ("  # first bytes of `faulthandler.dump_traceback_later`


def stacks_path(run_dir: str, rank: int) -> Path:
    """Return the path of a rank's stacks."""
    return Path(run_dir) / "logs" / f"rank-{rank}.stacks.txt"


class TimerTraces:
    """Detects stacks that timers write after its creation, in files that may have older ones."""

    def __init__(self, run_dir: str, ranks: Iterable[int]) -> None:
        paths = {rank: stacks_path(run_dir, rank) for rank in ranks}
        self._begins = {
            rank: (path, path.stat().st_size if path.exists() else 0)
            for rank, path in paths.items()
        }

    def path_if_ended(self, rank: int) -> Path | None:
        """Return the stack file of a rank that was ended by its timer, or None."""
        path, begin = self._begins[rank]
        try:
            with path.open("rb") as file:
                file.seek(begin)
                return path if _HEAD_OF_TIMER in file.read() else None
        except FileNotFoundError:
            return None

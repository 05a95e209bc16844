"""The files that a node's ranks write their stacks to, and what the timers in C have added there.

A rank that holds the interpreter lock for too long is ended by a timer of `faulthandler`, which
leaves no report and exits with 1: only this file tells that from any other error. `worker` has the
watchdog write there; `supervisor` reads it.
"""

from collections.abc import Iterable
from pathlib import Path

_HEAD_OF_TIMER = b"Timeout ("  # `faulthandler.dump_traceback_later` begins with it


def stacks_path(run_dir: str, rank: int) -> Path:
    """Return where the stacks of a rank are written."""
    return Path(run_dir) / "logs" / f"rank-{rank}.stacks.txt"


class TimerTraces:
    """What the timers of these ranks write from now on; earlier starts wrote to the same files."""

    def __init__(self, run_dir: str, ranks: Iterable[int]) -> None:
        paths = {rank: stacks_path(run_dir, rank) for rank in ranks}
        self._begins = {rank: (path, _size(path)) for rank, path in paths.items()}

    def path_if_ended(self, rank: int) -> Path | None:
        """Return the file of a rank whose timer has ended it, or None."""
        path, begin = self._begins[rank]
        try:
            with path.open("rb") as file:
                file.seek(begin)
                return path if _HEAD_OF_TIMER in file.read() else None
        except FileNotFoundError:
            return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

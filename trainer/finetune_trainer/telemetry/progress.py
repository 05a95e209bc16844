"""progress.json in the run directory: rank 0's newest word, never half-written."""

import os
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from finetune_trainer.config import Progress

FILE_NAME = "progress.json"
_SECONDS_BETWEEN_STEPS = 1.0


class ProgressFile:
    """Writes `Progress` values; a reader sees the old file or the new one, nothing between."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float]) -> None:
        """Create the run directory if need be."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / FILE_NAME
        self._clock = clock
        self._written_at = float("-inf")

    def write(self, progress: Progress, *, urgent: bool) -> None:
        """Write now if `urgent`, else only when the last write is a second old."""
        now = self._clock()
        if not urgent and now - self._written_at < _SECONDS_BETWEEN_STEPS:
            return
        self._written_at = now
        replace_text(self._path, progress.to_json())


def read_previous(run_dir: Path) -> Progress | None:
    """Return what the attempt before left behind, or None when it left nothing readable."""
    try:
        return Progress.read(run_dir / FILE_NAME)
    except (OSError, ValidationError):
        return None  # only ever carries display values over, so losing it costs no correctness


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text at once: written beside it, then renamed over it.

    No fsync: after a power cut the file may be old, and readers must bear that anyway.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)

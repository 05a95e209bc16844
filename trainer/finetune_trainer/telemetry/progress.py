"""progress.json in the run directory: rank 0's newest word, never half-written."""

from collections.abc import Callable
from pathlib import Path

from finetune_trainer.config import Progress
from finetune_trainer.files import replace_text

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

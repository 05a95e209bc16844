"""Write to the run directory so that a full disk does not end training.

`Telemetry` opens the `RunDirectory`; journal, progress and curves write through it only.
"""

from collections.abc import Callable
from pathlib import Path

from finetune_trainer.files import replace_text

TENSORBOARD_FOLDER = "tensorboard"


class RunDirectory:
    """Folder of an attempt's progress, logs and curves, for as long as the attempt owns it.

    Attributes:
        has_room: Whether the newest progress could be written.
    """

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        """Use the folder at `path`; `warn` receives a message for each failed write."""
        self.has_room = True
        self._path = Path(path)
        self._warn = warn
        self._is_released = False

    @property
    def curves(self) -> Path:
        """Folder for TensorBoard."""
        return self._path / TENSORBOARD_FOLDER

    def log_of(self, rank: int) -> Path:
        """Return the path of a rank's journal."""
        return self._path / "logs" / f"rank-{rank}.jsonl"

    def put_progress(self, text: str) -> None:
        """Replace the progress and update `has_room`."""
        path = self._path / "progress.json"
        self.has_room = self.put(lambda: replace_text(path, text))

    def put(self, write: Callable[[], object]) -> bool:
        """Call `write` and return whether it succeeded."""
        if self._is_released:
            return False
        try:
            write()
        except OSError as error:
            self._warn(
                f"{self._path} cannot be written ({error.strerror or error}); training continues, "
                "but this file lacks its reports until the disk has free space"
            )
            return False
        return True

    def release(self) -> None:
        """Stop writing, because the folder now belongs to a later attempt."""
        self._is_released = True

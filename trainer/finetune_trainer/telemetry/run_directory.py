"""`RunDirectory`: what the outlets write through, so that a full disk ends no training.

`Telemetry` opens it, and lets journal, progress and curves write by it alone.
"""

from collections.abc import Callable
from pathlib import Path

from finetune_trainer.files import replace_text

TENSORBOARD_FOLDER = "tensorboard"


class RunDirectory:
    """The folder of an attempt's progress, logs and curves, as long as the attempt has it.

    Attributes:
        has_room: Whether the newest progress could be written.
    """

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        """`warn` receives a sentence each time that something cannot be written."""
        self.has_room = True
        self._path = Path(path)
        self._warn = warn
        self._is_let_go = False

    @property
    def curves(self) -> Path:
        """The folder that TensorBoard reads."""
        return self._path / TENSORBOARD_FOLDER

    def log_of(self, rank: int) -> Path:
        """Return the file of a rank's journal."""
        return self._path / "logs" / f"rank-{rank}.jsonl"

    def put_progress(self, text: str) -> None:
        """Replace the progress, and find out whether there is room."""
        path = self._path / "progress.json"
        self.has_room = self.put(lambda: replace_text(path, text))

    def put(self, write: Callable[[], object]) -> bool:
        """Let an outlet write, and say whether it could."""
        if self._is_let_go:
            return False
        try:
            write()
        except OSError as error:
            self._warn(
                f"{self._path} cannot be written ({error.strerror or error}); training goes on, "
                "and its reports are missing there until there is room"
            )
            return False
        return True

    def let_go(self) -> None:
        """Write no further, as a later attempt has the folder now."""
        self._is_let_go = True

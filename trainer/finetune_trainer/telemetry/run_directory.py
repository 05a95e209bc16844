"""Write to the run directory so that a full disk does not end training.

`Telemetry` opens the `RunDirectory`; journal, progress and curves write through it only.
"""

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from finetune_trainer.config import Progress
from finetune_trainer.config.log_folders import log_folder
from finetune_trainer.errors import ClaimLostError, OvertakenError
from finetune_trainer.files import replace_text

TENSORBOARD_FOLDER = "tensorboard"
# Claims are checked each 4 s, so an older check means that this process was stopped meanwhile.
SECONDS_OF_A_PAUSE = 10.0


class RunDirectory:
    """Folder of an attempt's progress, logs and curves, for as long as the attempt owns it.

    Attributes:
        logs: Folder for the logs of this start of the attempt.
        has_room: Whether the newest progress could be written.
    """

    def __init__(
        self,
        path: Path,
        attempt: int,
        generation: int,
        *,
        warn: Callable[[str], None],
        check: Callable[[float], object],
    ) -> None:
        """Use the folder at `path`.

        Args:
            path: The run directory.
            attempt: Number of the attempt.
            generation: Number of this start of the attempt.
            warn: Receives a message for each failed write.
            check: Checks the claims if the last check is older than a number of seconds; see
                `Fence.check_if_older`.
        """
        self.logs = log_folder(path, attempt, generation)
        self.has_room = True
        self._path, self._attempt = path, attempt
        self._warn, self._check = warn, check
        self._is_released = False

    @property
    def curves(self) -> Path:
        """Folder for TensorBoard."""
        return self._path / TENSORBOARD_FOLDER

    def put_progress(self, text: str) -> None:
        """Replace the progress, unless a later attempt has written it, and update `has_room`."""
        path = self._path / "progress.json"
        self.has_room = self.put(lambda: replace_text(path, text, lambda: self._check_owner(path)))

    def put(self, write: Callable[[], object]) -> bool:
        """Call `write` and return whether it succeeded.

        After a pause of this process the claims are checked first, because a later attempt may own
        the folder by now.
        """
        if self._is_released:
            return False
        try:
            self._check(SECONDS_OF_A_PAUSE)
            write()
        except (OvertakenError, ClaimLostError):
            self.release()  # the thread that checks the claims ends this process
            return False
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

    def _check_owner(self, path: Path) -> None:
        """Check the claims after a pause, and if the progress at `path` is of a later attempt.

        A job that takes over the folders of an earlier job counts from 1, so its own attempt may be
        the lower one.

        Raises:
            OvertakenError: The later attempt owns the folder.
        """
        self._check(SECONDS_OF_A_PAUSE)
        try:
            found = Progress.read(path)
        except (FileNotFoundError, ValidationError):
            return
        if found.attempt > self._attempt:
            self._check(0.0)

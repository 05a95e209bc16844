"""The resource of one job in a file: what the API server is to the operator, for `ftctl run`.

`job.json` in the run directory holds the manifest with its status. One process at a time may drive
a job; the kernel's lock on `job.lock` says so and goes when that process ends, however it ends.
"""

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.errors import FineTuneError


class StoreError(FineTuneError):
    """The run directory cannot be used as it is."""


class JobLockedError(StoreError):
    """Another process drives the job; the message names it."""


class JobStore:
    """File-backed store of one job.

    Use it as a context manager around everything that changes the job: inside, no other process
    can. `load` works without.

    Args:
        run_dir: Folder of everything the run writes.
        outside: Folders of the run that are elsewhere (`checkpoint.uri`); they are moved aside
            together with the run directory.
    """

    def __init__(self, run_dir: Path, outside: Sequence[Path] = ()) -> None:
        self.run_dir = run_dir
        self.outside = tuple(outside)
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """The file that holds the job."""
        return self.run_dir / "job.json"

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            JobLockedError: another process holds it.
            StoreError: the run directory cannot be made.
        """
        self._lock = self._acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the lock back."""
        if self._lock is not None:
            # Not by closing alone: a child between its fork and its exec has the descriptor too.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def load(self) -> FineTuneJob | None:
        """Return the job as last saved, or None where there is none.

        Raises:
            StoreError: the file is there and is not a job.
        """
        try:
            return FineTuneJob.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise StoreError(
                f"{self.path} cannot be read as a job ({reason}); restore it, or start anew "
                "with --fresh, which moves it aside"
            ) from error

    def save(self, job: FineTuneJob) -> None:
        """Replace the file in one step; a reader sees the old job or the new one."""
        temporary = self.path.with_suffix(".json.tmp")
        with temporary.open("w") as file:
            file.write(job.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        folder = os.open(self.run_dir, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def has_checkpoint(self) -> bool:
        """Say whether a checkpoint of this run may exist, so that changing the data would mix."""
        folders = [self.run_dir / "checkpoints", *self.outside]
        return any(True for folder in folders for _ in folder.glob("step-*"))

    def move_aside(self) -> Path:
        """Rename the run directory to NAME.1, NAME.2, ... and start an empty one; keep the lock.

        Folders outside of it follow with the same number. Nothing is deleted.

        Returns:
            Where the old run directory is now.
        """
        folders = [self.run_dir, *(path for path in self.outside if path.exists())]
        number = 1
        while any(_numbered(folder, number).exists() for folder in folders):
            number += 1
        # The run directory goes last: until it does, a crash leaves a job that runs again and
        # moves the rest then.
        for folder in reversed(folders):
            if folder.exists():
                shutil.move(folder, _numbered(folder, number))
        old, self._lock = self._lock, None
        self._lock = self._acquire()
        if old is not None:
            os.close(old)
        return _numbered(self.run_dir, number)

    def _acquire(self) -> int:
        """Lock the file that is at the path now; an opened one may have been moved aside since."""
        path = self.run_dir / "job.lock"
        while True:
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise StoreError(
                    f"spec.backend.local.runDirectory {self.run_dir} cannot be written "
                    f"({error.strerror}); choose another folder"
                ) from error
            self._lock_or_say_whose(lock)
            if _is_at(lock, path):
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
            os.close(lock)

    def _lock_or_say_whose(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise JobLockedError(
                f"{self.run_dir} is in use by process {holder}; stop that one first, or watch it "
                "with ftctl logs -f"
            ) from None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _numbered(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.{number}")

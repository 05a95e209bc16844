"""The resource of one job in a file: what the API server is to the operator, for `ftctl run`.

`job.json` in the run directory holds the manifest with its status. One process at a time may drive
a job; the kernel's lock on `job.lock` says so and goes when that process ends, however it ends.
"""

import fcntl
import os
import re
import shlex
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.errors import FineTuneError

# A committed checkpoint, one being written, and one that a run went back behind.
_CHECKPOINT = re.compile(r"step-(\d+)(\.tmp|\.aside(-\d+)?)?")
_BEFORE_THE_FIRST_SAVE = {"job.lock", "job.json.tmp"}


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
        checkpoints: Folder of the run's checkpoints; by default the one in the run directory.
    """

    def __init__(self, run_dir: Path, checkpoints: Path | None = None) -> None:
        self.run_dir = run_dir
        self.checkpoints = checkpoints or run_dir / "checkpoints"
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """The file that holds the job."""
        return self.run_dir / "job.json"

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            JobLockedError: another process holds it.
            StoreError: the run directory cannot be made, or holds files of somebody else.
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

    def newest_step(self) -> int | None:
        """Return the step of the newest committed checkpoint; its content is not read."""
        found = (_CHECKPOINT.fullmatch(path.name) for path in self.checkpoints.glob("step-*"))
        return max((int(name[1]) for name in found if name and not name[2]), default=None)

    def outside(self) -> list[Path]:
        """Return the folders of the run that do not lie in its directory.

        The folder that `checkpoint.uri` names may hold other things: only checkpoints are the
        run's.
        """
        if self.run_dir in self.checkpoints.parents:
            return []
        found = self.checkpoints.glob("step-*")
        return sorted(path for path in found if _CHECKPOINT.fullmatch(path.name))

    def move_aside(self) -> Path:
        """Rename the run directory to NAME.1, NAME.2, ... and start an empty one; keep the lock.

        Checkpoints outside of it go to a folder with the same number. Nothing is deleted.

        Returns:
            Where the old run directory is now.
        """
        outside, number = self.outside(), 1
        folders = [self.run_dir, *([self.checkpoints] if outside else [])]
        while any(_numbered(folder, number).exists() for folder in folders):
            number += 1
        # The run directory goes last: until it does, a crash leaves a job that runs again and
        # moves the rest then.
        for folder in outside:
            target = _numbered(self.checkpoints, number)
            target.mkdir(exist_ok=True)
            shutil.move(folder, target / folder.name)
        shutil.move(self.run_dir, _numbered(self.run_dir, number))
        old, self._lock = self._lock, None
        self._lock = self._acquire()
        if old is not None:
            os.close(old)
        return _numbered(self.run_dir, number)

    def _acquire(self) -> int:
        """Lock the file that is at the path now; an opened one may have been moved aside since."""
        self._refuse_files_of_others()
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

    def _refuse_files_of_others(self) -> None:
        """A folder that no job was saved in is not ours to fill, and later to move."""
        if not self.run_dir.is_dir() or self.path.exists():
            return
        others = {path.name for path in self.run_dir.iterdir()} - _BEFORE_THE_FIRST_SAVE
        if others:
            raise StoreError(
                f"spec.backend.local.runDirectory {self.run_dir} holds {min(others)} and no "
                "job.json, so it is no run's; choose an empty or a new folder"
            )

    def _lock_or_say_whose(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise JobLockedError(
                f"{self.run_dir} is in use by process {holder}; stop that one first, or watch it "
                f"with: ftctl logs -f {shlex.quote(str(self.run_dir))}"
            ) from None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _numbered(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.{number}")

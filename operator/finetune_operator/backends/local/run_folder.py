"""The run directory of a job: reads and locks it, saves the job, and moves it aside.

`job.json` contains the job: with its current status in `ftctl run`, only as the owner in `ftctl
dev`. The lock on `job.lock` ends with the process that holds it, however that process ends.
"""

import fcntl
import os
import shlex
import shutil
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from finetune_operator.api.v1alpha1.job import FineTuneJob, ObjectMeta
from finetune_operator.backends.local import locks, outside, records
from finetune_operator.errors import FineTuneError

_BEFORE_THE_FIRST_SAVE = {"job.lock", "job.json.tmp"}


class RunFolderError(FineTuneError):
    """The run directory cannot be used as it is."""


class RunFolderLockedError(RunFolderError):
    """Another process uses the run directory; the message names that process."""


class RunFolder:
    """The run directory of one job.

    Use it as a context manager around all changes of the job: inside, no other process can change
    it.
    `load` works outside, too.

    Args:
        run_dir: Folder of all files that the run writes.
        checkpoints: Folder of the run's checkpoints; by default the one in the run directory.
        output: Folder of the trained model; by default the one in the run directory.
    """

    def __init__(
        self, run_dir: Path, checkpoints: Path | None = None, output: Path | None = None
    ) -> None:
        self.run_dir = run_dir
        self.checkpoints = checkpoints or run_dir / "checkpoints"
        self.output = output or run_dir / "output"
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """The file that holds the job."""
        return self.run_dir / "job.json"

    @property
    def log(self) -> Path:
        """The log of the operator in `ftctl run`."""
        return self.run_dir / "operator.log"

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            RunFolderLockedError: Another process holds it.
            RunFolderError: The run directory cannot be created, or contains foreign files.
        """
        self._lock = self._acquire()
        return self

    def __exit__(self, *raised: object) -> None:
        """Release the lock."""
        if self._lock is not None:
            # Closing is not enough: a child between its fork and its exec has the descriptor, too.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def load(self) -> FineTuneJob | None:
        """Return the job as last saved, or None if there is none.

        Raises:
            RunFolderError: The file is not a valid job.
        """
        try:
            return FineTuneJob.model_validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise RunFolderError(
                f"{self.path} cannot be read as a job ({reason}); restore it, or start over "
                "with --fresh, which moves it aside"
            ) from error

    def save(self, job: FineTuneJob) -> None:
        """Replace the file in one step; a reader sees the old job or the new one.

        Raises:
            RunFolderError: The file cannot be written; the previous content is unchanged.
        """
        text = job.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"
        try:
            records.write_text(self.path, text)
        except OSError as error:
            raise RunFolderError(
                f"{self.path} cannot be written ({error.strerror}); make room, or make it writable"
            ) from error

    def newest_step(self) -> int | None:
        """Return the step of the newest committed checkpoint; its content is not read."""
        return outside.newest_step(self.checkpoints)

    def outside(self) -> list[Path]:
        """Return the files of the run in folders outside of its directory."""
        return [path for found in self._outside().values() for path in found]

    def _outside(self) -> dict[Path, list[Path]]:
        found = {}
        if self.run_dir not in self.checkpoints.parents:
            found[self.checkpoints] = outside.of_checkpoints(self.checkpoints)
        if self.run_dir not in self.output.parents:
            found[self.output] = outside.of_output(self.output)
        return {folder: paths for folder, paths in found.items() if paths}

    def move_aside(self, job: ObjectMeta) -> Path:
        """Rename the run directory to NAME.1, NAME.2, ... and start an empty one; retain the lock.

        Files outside of it (checkpoints, the exported model, the claims on their folders) are moved
        to
        folders with the same number. No file is deleted.

        Args:
            job: The job that starts now.

        Returns:
            New path of the old run directory.

        Raises:
            RunFolderError: A folder outside belongs to another job.
        """
        found, number = self._outside(), 1
        for folder in found:
            self._refuse_folder_of_others(folder, job)
        while any(_numbered(folder, number).exists() for folder in (self.run_dir, *found)):
            number += 1
        # The run directory is moved last: after a crash before that, the next run moves the rest.
        for folder, paths in found.items():
            for path in paths:
                target = _numbered(folder, number) / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
        shutil.move(self.run_dir, _numbered(self.run_dir, number))
        old, self._lock = self._lock, None
        self._lock = self._acquire()
        if old is not None:
            os.close(old)
        return _numbered(self.run_dir, number)

    def make_way(self) -> None:
        """Rename the folder of the attempts, with progress and logs, for a job that takes over.

        The new job continues with the other files and starts with its own attempt 1.
        """
        attempts, number = self.run_dir / "attempts", 1
        while _numbered(attempts, number).exists():
            number += 1
        if attempts.exists():
            for path in (self.run_dir / "progress.json", self.run_dir / "logs"):
                if path.exists():
                    path.rename(attempts / path.name)
            attempts.rename(_numbered(attempts, number))

    def _refuse_folder_of_others(self, folder: Path, job: ObjectMeta) -> None:
        owner = outside.owner(folder)
        if owner is None or (owner.namespace, owner.name) == (job.namespace, job.name):
            return
        field = "spec.checkpoint.uri" if folder == self.checkpoints else "spec.output.uri"
        raise RunFolderError(
            f"{field} {folder} belongs to the job {owner.namespace}/{owner.name} (uid "
            f"{owner.uid}), which wrote there before this one; set another {field}"
        )

    def _acquire(self) -> int:
        """Lock the current file at the path; a file opened earlier may have been moved aside."""
        self._refuse_files_of_others()
        path = self.run_dir / "job.lock"
        while True:
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                lock = locks.opened(path)
            except OSError as error:
                raise RunFolderError(
                    f"spec.backend.local.runDirectory {self.run_dir} cannot be written "
                    f"({error.strerror}); choose another folder"
                ) from error
            self._lock_or_name_holder(lock)
            if _is_at(lock, path):
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
            os.close(lock)

    def _refuse_files_of_others(self) -> None:
        """Refuse a folder with files but no job, which must not be filled and later moved aside."""
        if not self.run_dir.is_dir() or self.path.exists():
            return
        others = {path.name for path in self.run_dir.iterdir()} - _BEFORE_THE_FIRST_SAVE
        if others:
            raise RunFolderError(
                f"spec.backend.local.runDirectory {self.run_dir} holds {min(others)} and no "
                "job.json, so it is not a run directory; choose an empty or a new folder"
            )

    def _lock_or_name_holder(self, lock: int) -> None:
        if locks.take(lock):
            return
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise RunFolderLockedError(
            f"{self.run_dir} is in use by process {holder}; stop that one first, or watch it "
            f"with: ftctl logs -f {shlex.quote(str(self.run_dir))}"
        )


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _numbered(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.{number}")

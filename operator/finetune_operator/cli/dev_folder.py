"""What `ftctl dev` keeps of a folder between two starts: objects, kubeconfig and log, in runs/.dev.

One process at a time may serve a folder; the kernel's lock says so and goes with that process.
"""

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from finetune_operator.backends.local import locks
from finetune_operator.backends.local.records import write_text
from finetune_operator.errors import FineTuneError


class DevFolderError(FineTuneError):
    """The folder cannot be served."""


@dataclass(frozen=True)
class DevFolder:
    """A folder that `ftctl dev` serves.

    Attributes:
        base: The folder, absolute; `file://./x` in a manifest is relative to it.
    """

    base: Path

    @property
    def path(self) -> Path:
        """Where everything is kept."""
        return self.base / "runs" / ".dev"

    @property
    def state(self) -> Path:
        """The objects of the API."""
        return self.path / "state.json"

    @property
    def kubeconfig(self) -> Path:
        """What kubectl needs; the path is the same at each start."""
        return self.path / "kubeconfig"

    @property
    def log(self) -> Path:
        """The operator's log where it is not printed."""
        return self.path / "operator.log"

    @property
    def export(self) -> str:
        """The line that makes kubectl ask this API."""
        return f"export KUBECONFIG={shlex.quote(str(self.kubeconfig))}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the one that serves it.

        Raises:
            DevFolderError: another process does, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = locks.opened(self.path / "lock")
        except OSError as error:
            raise DevFolderError(
                f"{self.path} cannot be written ({error.strerror}); make it writable, or serve "
                "another folder"
            ) from error
        try:
            if not locks.take(lock):
                holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
                raise DevFolderError(
                    f"{self.base} is served by process {holder}; use that one ({self.export}), or "
                    "stop it first"
                )
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            yield
        finally:
            # Not by closing alone: a child between its fork and its exec has the descriptor too.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def write_kubeconfig(self, text: str) -> None:
        """Replace the kubeconfig."""
        write_text(self.kubeconfig, text)
        self.kubeconfig.chmod(0o600)

"""State of `ftctl dev` across restarts, in runs/.dev: objects, kubeconfig and lock.

One process at a time serves a folder. It holds a file lock of the operating system, which is
released when the process ends.
"""

import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from finetune_operator.backends.local import locks
from finetune_operator.backends.local.records import write_text
from finetune_operator.errors import FineTuneError


class DevFolderError(FineTuneError):
    """The folder cannot be served."""


class DevFolder:
    """A folder that `ftctl dev` serves.

    Args:
        base: The folder; `file://./x` in a manifest is relative to it.

    Attributes:
        base: The folder, absolute.
        state: File with the objects of the API.
        kubeconfig: File for kubectl; the path is the same at every start.
        export: Shell line that makes kubectl use this API.
    """

    def __init__(self, base: Path) -> None:
        self.base = Path(os.path.normpath(base.absolute()))
        self._path = self.base / "runs" / ".dev"
        self.state = self._path / "state.json"
        self.kubeconfig = self._path / "kubeconfig"
        self.export = f"export KUBECONFIG={shlex.quote(str(self.kubeconfig))}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of the folder.

        Raises:
            DevFolderError: another process holds the lock, or the folder cannot be written.
        """
        lock = self._path / "lock"
        with ExitStack() as stack:
            try:
                self._path.mkdir(parents=True, exist_ok=True)
                is_free = stack.enter_context(locks.held(lock))
            except OSError as error:
                raise DevFolderError(
                    f"{self._path} cannot be written ({error.strerror}); make it writable, or "
                    "serve another folder"
                ) from error
            if not is_free:
                raise DevFolderError(
                    f"{self.base} is served by process {lock.read_text().strip() or 'unknown'}; "
                    f"use that one ({self.export}), or stop it first"
                )
            lock.write_text(str(os.getpid()))
            yield

    def write_kubeconfig(self, text: str) -> None:
        """Replace the kubeconfig."""
        write_text(self.kubeconfig, text)
        self.kubeconfig.chmod(0o600)

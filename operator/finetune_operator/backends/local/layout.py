"""Map the URIs of a manifest to paths on this machine, and define the files of a run.

Pure: it opens no file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import Handle

BACKEND = "local"
FILE = "file://"


class BadUriError(ValueError):
    """A URI that is not supported on this machine; the message names the alternative."""


def file_path(uri: str, manifest_dir: Path) -> Path:
    """Return the absolute path of a `file://` URI; `file://./x` is relative to the manifest.

    The text is not decoded: `%20` is three characters.

    Raises:
        BadUriError: The URI has another scheme, or a host.
    """
    if not uri.startswith(FILE):
        raise BadUriError(f"{uri} is not on this machine; use file://./PATH or file:///PATH")
    text = uri.removeprefix(FILE)
    if text.startswith("/"):
        return Path(os.path.normpath(text))
    if text == "." or text.startswith(("./", "../")):
        return Path(os.path.normpath(manifest_dir / text))
    raise BadUriError(
        f"{uri} names a host, not a folder; use file://./{text} (beside the manifest) or "
        f"file:///{text}"
    )


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder of the token cache, which all jobs share because it is keyed by content."""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "~"), ".cache")
    return Path(base).expanduser() / "finetune-operator" / "tokens"


@dataclass(frozen=True)
class Folders:
    """Folders of one job, absolute.

    Attributes:
        run: All files of the run except those for which the job names another folder.
        checkpoint: Committed checkpoints.
        output: The trained model.
    """

    run: Path
    checkpoint: Path
    output: Path


def folders_of(job: FineTuneJob, manifest_dir: Path) -> Folders:
    """Return the folders of the job; folders of another backend are elsewhere.

    Raises:
        BadUriError: `checkpoint.uri` or `output.uri` is not on this machine.
    """
    local, spec = job.spec.backend.local, job.spec
    name = Path("runs") / job.metadata.namespace / job.metadata.name
    given = Path(local.run_directory).expanduser() if local and local.run_directory else name
    run = Path(os.path.normpath(manifest_dir / given))
    checkpoint = output = None
    if spec.backend.type == BACKEND:
        checkpoint, output = spec.checkpoint.uri, spec.output.uri
    return Folders(
        run=run,
        checkpoint=file_path(checkpoint, manifest_dir) if checkpoint else run / "checkpoints",
        output=file_path(output, manifest_dir) if output else run / "output",
    )


@dataclass(frozen=True)
class AttemptFolder:
    """`attempts/N` of a run directory: the files of one attempt."""

    path: Path

    @property
    def run_dir(self) -> Path:
        """The run directory it belongs to."""
        return self.path.parent.parent

    @property
    def number(self) -> int:
        """Number of the attempt."""
        return int(self.path.name)

    @property
    def attempt(self) -> Path:
        """Record of the attempt; written before any process is started."""
        return self.path / "attempt.json"

    @property
    def config(self) -> Path:
        """The trainer's configuration."""
        return self.path / "config.json"

    @property
    def cancel(self) -> Path:
        """Record of a cancel, with the time of the kill."""
        return self.path / "cancel.json"

    @property
    def lock(self) -> Path:
        """Held by the process that submits the attempt."""
        return self.path / "submit.lock"

    def node(self, rank: int) -> Path:
        """Record of a node's main process; written by that process before any other action."""
        return self.path / f"node-{rank}.json"

    def exit(self, rank: int) -> Path:
        """Record of the exit code of a node's main process."""
        return self.path / f"node-{rank}.exit.json"

    def node_lock(self, rank: int) -> Path:
        """Held by a node's main process for as long as it lives."""
        return self.path / f"node-{rank}.lock"

    def log(self, rank: int) -> Path:
        """Return the log file with the standard output and error of a node."""
        return self.path / f"node-{rank}.log"

    def termination(self, rank: int) -> Path:
        """Termination message of a node."""
        return self.path / f"node-{rank}.termination.json"


def attempt_folder(run_dir: Path, number: int) -> AttemptFolder:
    """Return the folder of one attempt."""
    return AttemptFolder(run_dir / "attempts" / str(number))


def handle_for(folder: AttemptFolder, uid: str, manifest_dir: Path) -> Handle:
    """Return a handle that stays valid when the manifest's folder is moved between two runs."""
    path = folder.path
    name = path.relative_to(manifest_dir) if manifest_dir in path.parents else path
    return Handle(kind="ProcessGroup", name=str(name), uid=uid, url=f"{FILE}{folder.run_dir}")


def folder_of(handle: Handle, manifest_dir: Path) -> AttemptFolder:
    """Return the folder that `handle_for` named."""
    return AttemptFolder(manifest_dir / handle.name)

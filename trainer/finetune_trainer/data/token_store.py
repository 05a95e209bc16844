"""Store the token cache as raw memory-mapped arrays, committed by one rename.

Called by `sequences.prepare` alone. A folder `KEY/` is either complete or does not exist: it is
written as `KEY.HOST.tmp`, with its manifest of hashes last, and renamed. Processes of one machine
are serialised by a file lock, which the kernel releases when its holder dies. Machines that share
the folder may both write, and a process does not wait for a stopped process; the first rename wins.
"""

import hashlib
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from finetune_trainer.cache_locks import numbered, patient_lock
from finetune_trainer.config import ContractModel, DataReport
from finetune_trainer.errors import OutputNotWritableError
from finetune_trainer.files import recreate, sync_tree

MANIFEST = "manifest.json"
ARRAYS = {
    "tokens": np.int32,
    "is_label": np.bool_,
    "lengths": np.int32,
    "label_counts": np.int32,
    "rows": np.int64,
}


@dataclass(frozen=True, eq=False)
class Sequence:
    """A document as the model sees it.

    Attributes:
        tokens: (L,) int32, L >= 2.
        is_label: (L,) bool, whether a token is predicted; False for the first token.
        row: Number of the source row, counted from 1.
    """

    tokens: npt.NDArray[np.int32]
    is_label: npt.NDArray[np.bool_]
    row: int


class Manifest(ContractModel):
    """Content of a complete cache folder.

    Attributes:
        files: SHA-256 of each file.
        report: Report of the rows.
        stops: How many learned turns each special token ends; release 0.1.0 did not count them.
    """

    files: dict[str, str]
    report: DataReport
    stops: dict[int, int] | None = Field(None, description="Learned turns by their last token.")


@dataclass(frozen=True, eq=False)
class StoredTokens:
    """An open cache folder; the arrays are memory-mapped and read-only.

    Attributes:
        arrays: Arrays by name: tokens and is_label (all sequences end to end), lengths,
            label_counts and rows (one entry per sequence).
        fingerprint: Hash of every token and label, independent of rows and settings.
        stops: How many learned turns each special token ends; None if they were not counted.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    report: DataReport
    fingerprint: str
    stops: Mapping[int, int] | None = None


class TokenStore:
    """A cache folder, named by the hash of everything that its content depends on."""

    def __init__(self, cache_dir: Path, key: str) -> None:
        self._folder = cache_dir / "tokens" / key
        self._draft = self._draft_of(1)

    def open(self) -> StoredTokens | None:
        """Map the committed arrays; None if they do not exist or are damaged."""
        try:
            manifest = Manifest.read(self._folder / MANIFEST)
            if manifest.files != {name: _digest(self._path(name)) for name in ARRAYS}:
                return None
        except (OSError, ValidationError):
            return None
        arrays = {
            name: np.memmap(self._path(name), dtype=dtype, mode="r")
            for name, dtype in ARRAYS.items()
        }
        hashes = "".join(manifest.files[name] for name in ARRAYS if name != "rows")
        fingerprint = hashlib.sha256(hashes.encode()).hexdigest()
        return StoredTokens(arrays, manifest.report, fingerprint, manifest.stops)

    def write(self, parts: Iterable[Mapping[str, bytes]]) -> None:
        """Write the arrays of a draft part by part, without holding them in memory."""
        recreate(self._draft)
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(self._path(name, self._draft).open("wb"))
                for name in ARRAYS
            }
            for part in parts:
                for name, file in files.items():
                    file.write(part[name])

    def commit(self, report: DataReport, stops: Mapping[int, int]) -> None:
        """Rename the draft to the cache folder, replacing a damaged one."""
        files = {name: _digest(self._path(name, self._draft)) for name in ARRAYS}
        manifest = Manifest(files=files, report=report, stops=dict(stops))
        (self._draft / MANIFEST).write_text(manifest.to_json())
        sync_tree(self._draft)
        try:
            self._draft.rename(self._folder)
        except OSError:
            # Another process has committed the same content meanwhile, or the entry is damaged.
            if self.open() is not None:
                shutil.rmtree(self._draft)
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._draft.rename(self._folder)

    @contextmanager
    def lock(self, patience_seconds: float) -> Iterator[None]:
        """Hold a lock of this folder, after waiting for processes of this machine that work.

        Raises:
            OutputNotWritableError: the cache folder cannot be created or written.
        """
        with ExitStack() as stack:
            try:
                number = stack.enter_context(patient_lock(self._folder, patience_seconds))
            except OSError as error:
                raise OutputNotWritableError(
                    f"the token cache {self._folder.parent} cannot be written and locked "
                    f"({error.strerror}); choose another folder"
                ) from error
            self._draft = self._draft_of(number)
            yield

    def _draft_of(self, number: int) -> Path:
        host = numbered(socket.gethostname(), number)
        return self._folder.with_name(f"{self._folder.name}.{host}.tmp")

    def _path(self, name: str, folder: Path | None = None) -> Path:
        return (folder or self._folder) / f"{name}.bin"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Wait for a lock of a shared cache only as long as its holder works.

A process that is stopped or whose node does not respond retains its locks, perhaps indefinitely.
Its successor has a fence against such a process, but must not wait for it. `data` and
`model.snapshot` call this module.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO

PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.2
_BEATS_IN_PATIENCE = 6
_LOOKS_IN_PATIENCE = 12


@contextmanager
def patient_lock(path: Path, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[int]:
    """Hold the first lock of a series whose holder, if any, works; yield its number from 1.

    The locks are files beside `path`. A holder that works appends a byte to its file from a thread.
    If a file does not grow for `patience_seconds`, the next lock is used. Its holder must not write
    to the files that belong to an earlier number.

    Raises:
        OSError: a lock cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        with path.with_name(f"{numbered(path.name, number)}.lock").open("ab") as file:
            if _is_acquired(file, patience_seconds):
                os.ftruncate(file.fileno(), 0)
                beat = partial(os.write, file.fileno(), b".")
                with _repeating(beat, patience_seconds / _BEATS_IN_PATIENCE):
                    yield number
                return


def numbered(name: str, number: int) -> str:
    """Return the name of the files that belong to a lock."""
    return name if number == 1 else f"{name}.{number}"


@contextmanager
def hub_locks_broken(
    kind: str, name: str, patience_seconds: float = PATIENCE_SECONDS
) -> Iterator[None]:
    """Delete the locks of a repository while its downloads into the hub's cache make no progress.

    A lock of `huggingface_hub` only avoids that a file is downloaded twice: each download writes to
    a file of its own and renames it. A waiting process opens the file of the lock again several
    times a second, so it gets a new lock. The library has no timeout for it.

    Args:
        kind: `model` or `dataset`.
        name: Name of the repository, `ORG/NAME`.
        patience_seconds: Time without progress.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache, folder = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=name, repo_type=kind)
    idle = _IdleTime(lambda: _sizes(cache / folder / "blobs"))

    def look() -> None:
        if idle.seconds() > patience_seconds:
            for lock in (cache / ".locks" / folder).glob("*.lock"):
                lock.unlink(missing_ok=True)

    with _repeating(look, patience_seconds / _LOOKS_IN_PATIENCE):
        yield


class _IdleTime:
    """Time since a value changed."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read, self._seen, self._since = read, read(), time.monotonic()

    def seconds(self) -> float:
        """Read the value, and return the time since it changed."""
        if (now := self._read()) != self._seen:
            self._seen, self._since = now, time.monotonic()
        return time.monotonic() - self._since


def _is_acquired(file: BinaryIO, patience_seconds: float) -> bool:
    """Wait for the lock of a file; return False if the file does not grow for too long."""
    idle = _IdleTime(lambda: os.fstat(file.fileno()).st_size)
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if idle.seconds() > patience_seconds:
            return False
        time.sleep(_POLL_SECONDS)


@contextmanager
def _repeating(act: Callable[[], object], seconds: float) -> Iterator[None]:
    """Act in a thread at intervals; an error of the disk, which others report, is ignored."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            with suppress(OSError):
                act()

    thread = threading.Thread(target=repeat, name="cache-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a folder, which may disappear meanwhile."""
    found = {}
    for path in folder.glob("*"):
        with suppress(OSError):
            found[path.name] = path.stat().st_size
    return found

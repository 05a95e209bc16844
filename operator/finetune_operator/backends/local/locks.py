"""File locks, which the kernel releases when the process that holds them ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def opened(path: Path) -> int:
    """Return a descriptor of the lock file, which is created if it is missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def take(descriptor: int) -> bool:
    """Take the lock; return False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold the lock inside the block; the value is whether it was free."""
    descriptor = opened(path)
    try:
        yield take(descriptor)
    finally:
        # Closing is not enough: a child between its fork and its exec has the descriptor, too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

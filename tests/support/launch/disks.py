"""Disks that are full."""

from contextlib import suppress
from pathlib import Path


def fill(disk: Path) -> Path:
    """Leave no room on a disk, and return the file that takes it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler

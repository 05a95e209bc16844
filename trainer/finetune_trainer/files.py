"""What several parts do with files: replace one at once, make folders anew, sync them to disk."""

import errno
import os
import shutil
from pathlib import Path

_CANNOT_RENAME = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text at once: a reader sees the old one or the new one, nothing between.

    Without fsync: it is for news, which readers must be able to miss, not for checkpoints.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        move_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def move_file(source: Path, target: Path) -> None:
    """Put a file in the place of another at once, or by copying where a layer cannot rename."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno not in _CANNOT_RENAME:
            raise
        shutil.copyfile(source, target)
        sync(target)
        source.unlink()


def make_anew(folder: Path) -> Path:
    """Make an empty folder, in the place of what is there, and return it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make every file and folder below `folder`, and itself, durable."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)

"""What several parts do with files: replace one at once, make folders anew, sync them to disk."""

import errno
import os
import shutil
import stat
from pathlib import Path

_CANNOT_RENAME = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text at once: a reader sees the old one or the new one, nothing between.

    Without fsync: it is for news, which readers must be able to miss, not for checkpoints.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode())
        move_file(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


def share_as(path: Path, other: Path) -> None:
    """Let those read a file who may read `other`, a file made by opening it: the umask's choice.

    Some libraries make files that their owner alone may read. A layer without modes is left alone.
    """
    mode = stat.S_IMODE(other.stat().st_mode)
    if stat.S_IMODE(path.stat().st_mode) == mode:
        return
    try:
        path.chmod(mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def make_anew(folder: Path) -> Path:
    """Make an empty folder, in the place of what is there, and return it."""
    remove_tree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_tree(folder: Path) -> None:
    """Delete a folder as far as listings show what is in it; one that is gone already is fine.

    Where listings lag, names that are gone are passed over, and a folder with files that are not
    listed yet stays with them.

    Raises:
        OSError: something cannot be deleted.
    """

    def pass_over(_: object, __: str, error: tuple[object, BaseException, object]) -> None:
        raised = error[1]
        if not isinstance(raised, OSError) or raised.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise raised

    shutil.rmtree(folder, onerror=pass_over)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make every file and folder below `folder`, and itself, durable; all must be listed by now."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)

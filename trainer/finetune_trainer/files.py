"""Common file operations: replace a file atomically, recreate a folder, sync to disk."""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

_CANNOT_RENAME = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)


def replace_text(path: Path, text: str, check: Callable[[], object] = lambda: None) -> None:
    """Replace a file's text atomically: a reader sees the old text or the new one.

    It does not call fsync, so use it for progress and similar files, which may be lost, not for
    checkpoints. `check` is called immediately before, and may raise an exception to prevent it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode())
        check()
        move_file(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def move_file(source: Path, target: Path) -> None:
    """Replace a file by another atomically, or by copying if the file system cannot rename."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno not in _CANNOT_RENAME:
            raise
        shutil.copyfile(source, target)
        sync(target)
        source.unlink()


def leaves(folder: Path, name: str) -> bool:
    """Whether the relative path of a file leads out of `folder` through a symbolic link."""
    return not (folder / name).parent.resolve().is_relative_to(folder.resolve())


def copy_permissions(path: Path, other: Path) -> None:
    """Give a file the permissions of `other`, a file that was created with the umask.

    Some libraries create files that only their owner can read. File systems without modes are left
    alone.
    """
    mode = stat.S_IMODE(other.stat().st_mode)
    if stat.S_IMODE(path.stat().st_mode) == mode:
        return
    try:
        path.chmod(mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def recreate(folder: Path) -> Path:
    """Create an empty folder in place of an existing one, and return it."""
    remove_tree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_tree(folder: Path) -> None:
    """Delete a folder with all contents that listings show; a missing folder is fine.

    If listings lag, missing names are skipped, and a folder stays if it has files that are not
    listed yet.

    Raises:
        OSError: A file or folder cannot be deleted.
    """

    def pass_over(_: object, __: str, error: tuple[object, BaseException, object]) -> None:
        raised = error[1]
        if not isinstance(raised, OSError) or raised.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise raised

    shutil.rmtree(folder, onerror=pass_over)


def sync(path: Path) -> None:
    """Make a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make `folder` and every file and folder in it durable; all of them must be listed by now."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)

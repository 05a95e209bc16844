"""Find the files that contain manifests and read them; `manifest.py` calls it.

Only regular files are opened, because a read of a named pipe or a device may block indefinitely. A
stream that the shell creates for the command is read like standard input.
"""

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from finetune_operator.api.problems import Problem, Severity

STDIN = "-"
MOST_BYTES = 16 * 2**20
"""Objects in a cluster have at most 1.5 MiB."""
TOO_LARGE = f"is larger than {MOST_BYTES // 2**20} MiB, the limit for a manifest; split it"

_SUFFIXES = frozenset({".yaml", ".yml", ".json"})
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}")  # a Path drops one of the two
_STREAMS = re.compile(r"/dev/stdin|(/dev/fd|/proc/self/fd)/\d+")
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_stream(file: str) -> bool:
    """Whether a file can be read only once: `-`, `/dev/stdin`, or the path of `<(command)`."""
    return file == STDIN or _STREAMS.fullmatch(file) is not None


def is_folder(path: str) -> bool:
    """Whether a path is a folder; False if this cannot be determined."""
    return os.path.isdir(path)  # unlike Path.is_dir, no error if a parent is unreadable


def files_below(folder: str) -> Iterator[str | Problem]:
    """Yield the files below a folder that may contain manifests, in order.

    Hidden files and files of other kinds are ignored. Unreadable folders and links to folders are
    reported as problems.
    """
    problems: list[Problem] = []
    found: list[Path] = []
    for place, folders, files in os.walk(
        folder, onerror=lambda error: problems.append(_closed(error))
    ):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(inner := os.path.join(place, name)):
                message = "skipped: it is a link to a folder; name that folder"
                problems.append(Problem("", message, Severity.WARNING, inner))
        found += [
            Path(place, name)
            for name in files
            if not name.startswith(".") and Path(name).suffix in _SUFFIXES
        ]
    yield from problems
    if not found:
        yield Problem("", "contains no .yaml, .yml or .json file", file=folder)
    yield from map(str, sorted(found))


def read_bytes(file: str) -> bytes | Problem:
    """Return the content of a file, or a problem if it cannot be read."""
    if (url := _URL.match(file)) and not os.path.lexists(file):
        is_web = url[1].lower() in ("http", "https")
        advice = "save it and name the file" if is_web else "name the file by its path"
        return Problem("", f"is a URL, and URLs are not read; {advice}", file=file)
    try:
        return _stdin() if file == STDIN else _read_file(file)
    except OSError as error:
        return Problem("", _cannot(file, error), file=file)


def _closed(error: OSError) -> Problem:
    message = f"cannot be read ({error.strerror}); its files were not checked"
    return Problem("", message, file=str(error.filename))


def _cannot(file: str, error: OSError) -> str:
    if error.errno == errno.ENOENT and os.path.islink(file):
        return f"cannot be read: it is a link to {os.readlink(file)}, which does not exist"
    return f"cannot be read ({error.strerror})"


def _stdin() -> bytes | Problem:
    if sys.stdin is None:
        return Problem("", "cannot be read: standard input is closed", file=STDIN)
    return _bounded(sys.stdin.buffer, STDIN)


def _read_file(file: str) -> bytes | Problem:
    mode = os.stat(file).st_mode  # before open(), which blocks on a pipe without a writer
    for is_kind, name in _KINDS:
        if is_kind(mode) and not is_stream(file):
            message = f"is {name}; name a file, or pipe it to standard input (-f -)"
            return Problem("", message, file=file)
    with open(file, "rb") as opened:
        return _bounded(opened, file)


def _bounded(source: BinaryIO, file: str) -> bytes | Problem:
    read = source.read(MOST_BYTES + 1)
    return read if len(read) <= MOST_BYTES else Problem("", TOO_LARGE, file=file)

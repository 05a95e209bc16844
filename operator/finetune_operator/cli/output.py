"""Guard standard output and error of every command.

`app.main` calls `guard` before any output, so that no command ends in a traceback if the reader
closes the pipe, the disk is full, a descriptor is closed, or the locale lacks a character.
"""

import codecs
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

EXIT_UNWRITTEN = 1
EXIT_UNREAD = 141  # the exit code of a shell for a program that is killed by SIGPIPE

_STDIN, _STDOUT, _STDERR = range(3)
_REPLACEMENTS = {"→": "->", "…": "...", "━": "-", "╸": "-", "╺": "-"} | {
    chr(code): "*"
    for code in range(0x2800, 0x2900)  # the dots of a spinner
}


class OutputLostError(Exception):
    """Standard output can no longer be written.

    The class is not an `OSError`, which click would handle itself.

    Attributes:
        code: Exit code of the command.
    """

    def __init__(self, error: OSError, sentence: str = "") -> None:
        self._is_unread = error.errno == errno.EPIPE
        self.code = EXIT_UNREAD if self._is_unread else EXIT_UNWRITTEN
        what = "is closed" if self._is_unread else f"cannot be written ({error.strerror})"
        super().__init__(f"standard output {what}{sentence}")
        self._is_quiet = self._is_unread and not sentence

    def report(self) -> None:
        """Print the error to standard error, unless a reader such as `head` has simply finished."""
        if not self._is_quiet:
            print(self, file=sys.stderr)


class Outlet(io.RawIOBase):
    """A file descriptor, below the buffer and the encoding.

    Args:
        number: Number of the descriptor.
        is_last: Whether a failed write cannot be reported anywhere, so that output is dropped.
    """

    def __init__(self, number: int, *, is_last: bool) -> None:
        self._number = number
        self._is_last = is_last
        self._lost: OSError | None = None
        self._on_loss: Callable[[OSError], object] | None = None
        self._is_stopping: Callable[[], bool] = bool
        self._fallback: int | None = None

    def writable(self) -> bool:
        """Return True, as `BufferedWriter` demands."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._number

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._number)

    def write(self, data: Any, /) -> int:
        """Write some bytes, or drop them all after `drop` or inside `watched`.

        Raises:
            OutputLostError: the descriptor cannot be written.
        """
        if self._lost is None:
            try:
                return _write(self._number, data)
            except OSError as error:
                self._lost = error
                if self._on_loss is not None:
                    self._on_loss(error)
        if self._fallback is None and self._is_stopping():
            self._fallback = _STDERR
        if self._fallback is not None:
            with suppress(OSError):
                return _write(self._fallback, data)
        elif self._on_loss is None and not self._is_last:
            raise OutputLostError(self._lost) from self._lost
        return len(data)

    def drop(self) -> None:
        """Drop all further output."""
        self._is_last, self._lost = True, self._lost or OSError()

    @contextmanager
    def watched(
        self, on_loss: Callable[[OSError], object], is_stopping: Callable[[], bool]
    ) -> Iterator[None]:
        """Call `on_loss` once in this context instead of raising, and drop all further output.

        Args:
            on_loss: Called on the writing thread.
            is_stopping: Whether the user has pressed Ctrl-C, which also ends readers such as `tee`.
                Further output then goes to standard error, also after this context.
        """
        self._on_loss, self._is_stopping = on_loss, is_stopping
        try:
            yield
        finally:
            self._on_loss, self._is_stopping = None, bool


def guard() -> Outlet:
    """Guard both streams; return the outlet of standard output."""
    for number in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # otherwise the next opened file gets this number
    codecs.register_error("ftctl", _replace_character)
    out, err = Outlet(_STDOUT, is_last=False), Outlet(_STDERR, is_last=True)
    sys.stdout = _text(out, sys.stdout)
    sys.stderr = _text(err, sys.stderr, by_line=True)
    return out


def outlet() -> Outlet | None:
    """Return the outlet of standard output; None if it is not guarded."""
    found = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return found if isinstance(found, Outlet) else None


def takes_unicode() -> bool:
    """Whether standard output can encode every character."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def _text(raw: Outlet, before: TextIO | None, *, by_line: bool = False) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if before is None else before.encoding,
        errors="ftctl",
        line_buffering=by_line or raw.isatty(),
        write_through=bool(getattr(before, "write_through", False)),
    )


def _write(number: int, data: Any) -> int:
    while True:
        try:
            return os.write(number, data)
        except BlockingIOError:  # another process has set O_NONBLOCK on the shared pipe or terminal
            select.select([], [number], [])


def _replace_character(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return the replacement of a character that the stream's encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character, end = error.object[error.start], error.start + 1
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return bytes([code - 0xDC00]), end  # a byte of an undecodable file name
    if character in _REPLACEMENTS:
        return _REPLACEMENTS[character], end
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}", end

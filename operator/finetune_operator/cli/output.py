"""Standard output and error of every command, whatever they are connected to.

`app.main` calls `guard` before anything is printed. A reader that goes away, a full disk, a closed
descriptor and a locale that lacks a character end no command in a traceback.
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
EXIT_UNREAD = 141  # as a shell reports a program that wrote to a pipe nobody reads

_STDIN, _STDOUT, _STDERR = range(3)
_INSTEAD = {"→": "->", "…": "...", "━": "-", "╸": "-", "╺": "-"} | {
    chr(code): "*"
    for code in range(0x2800, 0x2900)  # the dots of a spinner
}


class OutputLostError(Exception):
    """Standard output cannot be written any more.

    No `OSError`, which click would take for its own.

    Attributes:
        code: What the command exits with.
    """

    def __init__(self, error: OSError, sentence: str = "") -> None:
        self._is_unread = error.errno == errno.EPIPE
        self.code = EXIT_UNREAD if self._is_unread else EXIT_UNWRITTEN
        what = "is closed" if self._is_unread else f"cannot be written ({error.strerror})"
        super().__init__(f"standard output {what}{sentence}")
        self._is_quiet = self._is_unread and not sentence

    def tell(self) -> None:
        """Say so on standard error; of a reader that has enough nobody speaks."""
        if not self._is_quiet:
            print(self, file=sys.stderr)


class Outlet(io.RawIOBase):
    """One descriptor, below the buffer and the encoding.

    Args:
        number: Of the descriptor.
        is_last: There is nowhere to tell that it cannot be written, so what it misses is dropped.
    """

    def __init__(self, number: int, *, is_last: bool) -> None:
        self._number = number
        self._is_last = is_last
        self._lost: OSError | None = None
        self._on_loss: Callable[[OSError], object] | None = None
        self._is_stopping: Callable[[], bool] = bool
        self._instead: int | None = None

    def writable(self) -> bool:
        """Say yes."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._number

    def isatty(self) -> bool:
        """Say whether it is a terminal."""
        return os.isatty(self._number)

    def write(self, data: Any, /) -> int:
        """Write some bytes, all of which are dropped where that is wanted.

        Raises:
            OutputLostError: they cannot be written, and nobody watches.
        """
        if self._lost is None:
            try:
                return _write(self._number, data)
            except OSError as error:
                self._lost = error
                if self._on_loss is not None:
                    self._on_loss(error)
        if self._instead is None and self._is_stopping():
            self._instead = _STDERR
        if self._instead is not None:
            with suppress(OSError):
                return _write(self._instead, data)
        elif self._on_loss is None and not self._is_last:
            raise OutputLostError(self._lost) from self._lost
        return len(data)

    def drop(self) -> None:
        """Drop what is written from now on."""
        self._is_last, self._lost = True, self._lost or OSError()

    @contextmanager
    def watched(
        self, on_loss: Callable[[OSError], object], is_stopping: Callable[[], bool]
    ) -> Iterator[None]:
        """Inside the block, call `on_loss` once instead of raising, and drop what is written then.

        Args:
            on_loss: Called on the thread that writes.
            is_stopping: The user has pressed Ctrl-C, which also ended a reader such as `tee`; then
                what is written goes to standard error, and does so after the block as well.
        """
        self._on_loss, self._is_stopping = on_loss, is_stopping
        try:
            yield
        finally:
            self._on_loss, self._is_stopping = None, bool


def guard() -> Outlet:
    """Make both streams take whatever is printed; return standard output's."""
    for number in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # else the next file that is opened gets this number
    codecs.register_error("ftctl", _spelled)
    out, err = Outlet(_STDOUT, is_last=False), Outlet(_STDERR, is_last=True)
    sys.stdout = _text(out, sys.stdout)
    sys.stderr = _text(err, sys.stderr, by_line=True)
    return out


def outlet() -> Outlet | None:
    """Return standard output's, where it is guarded."""
    found = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return found if isinstance(found, Outlet) else None


def takes_unicode() -> bool:
    """Tell whether standard output has all characters."""
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
        except BlockingIOError:  # another program made the pipe or terminal that it shares so
            select.select([], [number], [])


def _spelled(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return what stands for a character that the stream's encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character, end = error.object[error.start], error.start + 1
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return bytes([code - 0xDC00]), end  # of a file name that is no text
    if character in _INSTEAD:
        return _INSTEAD[character], end
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}", end

"""Write responses to standard output as they are generated, without control characters.

`conversation` calls it. A model can generate escape sequences, which would control the terminal.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

_REPLACED = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd")
_PRINTABLE = _REPLACED | {ord(one): one for one in "\n\t"}
_BOLD, _GREEN, _DIM, _PLAIN = "\x1b[1m", "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


class OutputClosedError(Exception):
    """Standard output cannot be written; the message is empty if its reader has closed it."""


def printable(text: str) -> str:
    """Replace all control characters except line breaks and tabs."""
    return text.replace("\r\n", "\n").translate(_PRINTABLE)


def note(text: str) -> None:
    """Print a line to standard error, if it can be written."""
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


class Screen:
    """Labels and responses, with colors on a terminal.

    Args:
        out: Stream of all text.
        environ: Environment; NO_COLOR turns the colors off.
    """

    def __init__(self, out: TextIO, environ: Mapping[str, str] = os.environ) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._has_colors = self._is_terminal and not environ.get("NO_COLOR")

    def question(self, text: str) -> None:
        """Print a question that the user has not typed on this terminal."""
        self._write(f"{self._styled('question', _BOLD)}: {printable(text)}\n")

    def begin(self, label: str) -> None:
        """Print the name of the model that responds next: on a line of its own on a terminal."""
        color = _GREEN if label == "trained" else _BOLD
        end = "\n" if self._is_terminal else ": "
        self._write(("\n" if self._is_terminal else "") + self._styled(label, color) + end)

    def text(self, piece: str) -> None:
        """Print a piece of a response."""
        self._write(printable(piece))

    def end(self, remark: str = "") -> None:
        """End a response, with a remark behind it; in a file or pipe there is only the response."""
        if remark and self._is_terminal:
            self._write(self._styled(f" ({remark})", _DIM))
        self._write("\n")
        if remark and not self._is_terminal:
            note(remark)

    def gap(self) -> None:
        """Print an empty line."""
        self._write("\n")

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{_PLAIN}" if self._has_colors else text

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError as error:
            raise OutputClosedError from error
        except OSError as error:
            raise OutputClosedError(
                f"standard output cannot be written ({error.strerror})"
            ) from error

"""What a terminal shows after some output: the part of a terminal that `ftctl run` uses.

`recording` feeds it a real run. A sequence that it does not know is an error, so that a picture is
never of something else than the terminal showed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

_SEQUENCE = re.compile(r"\x1b\[(\?)?([\d;]*)([A-Za-z])|\x1b\](?:[^\x07\x1b]*)(?:\x07|\x1b\\)")
_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


@dataclass(frozen=True)
class Style:
    """How a character looks.

    Attributes:
        color: A name, such as `green` or `bright black`, or `#rrggbb`; empty for the default.
    """

    color: str = ""
    is_bold: bool = False
    is_dim: bool = False

    def changed(self, code: int) -> "Style":
        """Return the style after a code of `SGR`.

        Raises:
            ValueError: The code is none that a picture knows.
        """
        if code == 0:
            return Style()
        if code in (1, 2):
            return replace(self, is_bold=self.is_bold or code == 1, is_dim=self.is_dim or code == 2)
        if code == 22:
            return replace(self, is_bold=False, is_dim=False)
        if code in (3, 4, 23, 24):  # italic and underlined text is drawn as any other
            return self
        if code == 39:
            return replace(self, color="")
        if 30 <= code <= 37:
            return replace(self, color=_COLORS[code - 30])
        if 90 <= code <= 97:
            return replace(self, color=f"bright {_COLORS[code - 90]}")
        raise ValueError(f"a color or style with the code {code} is not known here")


@dataclass(frozen=True)
class Run:
    """Characters of one row that look the same."""

    column: int
    text: str
    style: Style


Row = tuple[Run, ...]


class Screen:
    """A screen of characters, and where the next one goes.

    Args:
        columns: Its width.
        lines: Its height.
    """

    def __init__(self, columns: int, lines: int) -> None:
        self._columns = columns
        self._blank = (" ", Style())
        self._cells = [[self._blank] * columns for _ in range(lines)]
        self._line = self._column = 0
        self._style = Style()
        self._rest = ""

    def feed(self, output: str) -> None:
        """Take output; what is half a sequence waits for its other half.

        Raises:
            ValueError: A sequence is not known.
        """
        output, self._rest = self._rest + output, ""
        at = 0
        while at < len(output):
            if output[at] != "\x1b":
                self._character(output[at])
                at += 1
            elif found := _SEQUENCE.match(output, at):
                self._sequence(*found.groups())
                at = found.end()
            elif len(output) - at < 16:
                self._rest = output[at:]
                return
            else:
                raise ValueError(f"the sequence {output[at : at + 16]!r} is not known here")

    def rows(self) -> tuple[Row, ...]:
        """Return what it shows, without the blanks at the end of each row."""
        return tuple(tuple(_runs(cells)) for cells in self._cells)

    def text(self) -> str:
        """Return the characters it shows."""
        lines = ("".join(character for character, _ in cells).rstrip() for cells in self._cells)
        return "\n".join(lines).rstrip()

    def _character(self, character: str) -> None:
        if character == "\n":
            self._feed_line()
        elif character == "\r":
            self._column = 0
        elif character >= " ":
            if self._column == self._columns:
                self._column = 0
                self._feed_line()
            self._cells[self._line][self._column] = (character, self._style)
            self._column += 1
        elif character != "\x07":
            raise ValueError(f"the character {character!r} is not known here")

    def _feed_line(self) -> None:
        if self._line + 1 < len(self._cells):
            self._line += 1
        else:
            self._cells = [*self._cells[1:], [self._blank] * self._columns]

    def _sequence(self, private: str | None, numbers: str | None, kind: str | None) -> None:
        if kind is None or private:  # a title; a mode, such as a hidden cursor
            return
        values = [int(one or 0) for one in (numbers or "").split(";")]
        first = max(values[0], 1)
        if kind == "m":
            self._style = _styled(self._style, values)
        elif kind == "A":
            self._line = max(self._line - first, 0)
        elif kind == "B":
            self._line = min(self._line + first, len(self._cells) - 1)
        elif kind == "K" and values[0] in (0, 2):
            start = 0 if values[0] == 2 else self._column
            width = self._columns - start
            self._cells[self._line][start:] = [self._blank] * width
        else:
            raise ValueError(f"the sequence {numbers}{kind} is not known here")


def _styled(style: Style, codes: list[int]) -> Style:
    """Return the style after all codes of one sequence; a color of 256 takes three of them."""
    while codes:
        if codes[:2] == [38, 5]:
            style, codes = replace(style, color=_of_256(codes[2])), codes[3:]
        else:
            style, codes = style.changed(codes[0]), codes[1:]
    return style


def _of_256(number: int) -> str:
    """Return a color of a terminal's palette of 256: sixteen names, a cube and a scale of grays."""
    if number < 16:
        return ("bright " if number > 7 else "") + _COLORS[number % 8]
    if number < 232:
        levels = (0, 95, 135, 175, 215, 255)
        place = number - 16
        red, green, blue = levels[place // 36], levels[place // 6 % 6], levels[place % 6]
    else:
        red = green = blue = 8 + 10 * (number - 232)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _runs(cells: list[tuple[str, Style]]) -> Iterator[Run]:
    """Divide a row into words that look the same; blanks are where nothing is drawn."""
    text = "".join(character for character, _ in cells)
    for word in re.finditer(r"\S+(?: \S+)*", text):
        start = word.start()
        for column in range(start + 1, word.end() + 1):
            if column == word.end() or cells[column][1] != cells[start][1]:
                if text[start:column].strip():
                    yield Run(start, text[start:column], cells[start][1])
                start = column

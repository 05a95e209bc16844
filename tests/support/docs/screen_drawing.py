"""A recorded terminal as an SVG that plays by itself, also where a page shows it as an image.

Each row of each moment is drawn once, and shown for as long as the terminal showed it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from support.docs.terminal_screen import Row, Run

WIDTH, HEIGHT = 8.4, 19.0
"""Of a character, in pixels."""
_SIZE = 14
_PAD = 16.0
_BAR = 34.0
_BACK, _FORE, _TITLE = "#0d1117", "#d5dbe3", "#8b949e"
_COLORS = {
    "black": "#6e7681",
    "red": "#ff7b72",
    "green": "#56d364",
    "yellow": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#56d4dd",
    "white": "#d5dbe3",
}


@dataclass(frozen=True)
class Moment:
    """What a terminal showed from a time on.

    Attributes:
        start: Seconds of the picture.
        rows: All of its rows.
    """

    start: float
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class _Shown:
    """One row of the terminal while it did not change."""

    line: int
    row: Row
    start: float
    end: float


def draw(moments: Sequence[Moment], length: float, title: str, columns: int) -> str:
    """Return an SVG that shows the moments over and over.

    Where nothing plays, it shows the last moment.

    Args:
        moments: In the order of their start; the first starts at 0.
        length: Seconds until it begins again.
        title: Stands above the rows.
        columns: Width of the terminal.
    """
    lines = len(moments[0].rows)
    width, height = columns * WIDTH + 2 * _PAD, lines * HEIGHT + _BAR + _PAD
    drawn = "\n".join(_drawn(one, length) for one in _shown(moments, length) if one.row)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" \
font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="{_SIZE}" \
fill="{_FORE}">
<title>{escape(title)}</title>
<rect width="100%" height="100%" rx="8" fill="{_BACK}"/>
<text x="{_PAD}" y="23" fill="{_TITLE}">{escape(title)}</text>
{drawn}
</svg>
"""


def _shown(moments: Sequence[Moment], length: float) -> list[_Shown]:
    found = []
    ends = [*(one.start for one in moments[1:]), length]
    for line in range(len(moments[0].rows)):
        start, row = 0.0, moments[0].rows[line]
        for moment, end in zip(moments, ends, strict=True):
            if moment.rows[line] != row:
                found.append(_Shown(line, row, start, moment.start))
                start, row = moment.start, moment.rows[line]
            if end == length:
                found.append(_Shown(line, row, start, length))
    return found


def _drawn(one: _Shown, length: float) -> str:
    y = _BAR + one.line * HEIGHT + _SIZE
    text = "".join(_text(run, y) for run in one.row)
    if one.start == 0 and one.end == length:
        return f"<g>{text}</g>"
    is_last = one.end == length
    times = [0.0, one.start / length, one.end / length]
    values = ["hidden", "visible", "hidden"]
    if one.start == 0:
        times, values = times[1:], values[1:]
    if is_last:
        times, values = times[:-1], values[:-1]
    hidden = "" if is_last else ' visibility="hidden"'
    plays = (
        f'<animate attributeName="visibility" values="{";".join(values)}"'
        f' keyTimes="{";".join(f"{time:.4g}" for time in times)}"'
        f' dur="{length:g}s" calcMode="discrete" repeatCount="indefinite"/>'
    )
    return f"<g{hidden}>{text}{plays}</g>"


def _text(run: Run, y: float) -> str:
    """Draw characters in their columns, whatever font there is."""
    style = run.style
    name = style.color.removeprefix("bright ")
    color = _COLORS.get(name, name)
    looks = f' fill="{color}"' if color else ""
    looks += ' font-weight="bold"' if style.is_bold else ""
    looks += ' opacity=".6"' if style.is_dim else ""
    x, width = _PAD + run.column * WIDTH, len(run.text) * WIDTH
    place = f'x="{x:.4g}" y="{y:.4g}" textLength="{width:.4g}"'
    return f"<text {place}{looks}>{escape(run.text)}</text>"

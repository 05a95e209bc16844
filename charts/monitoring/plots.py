"""Plots of panels as SVG: lines, stacks, bars, states and heatmaps; `draw.py` calls it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]
Limits = Sequence[tuple[float, str]]
"""Values with the colour of the dashed line."""

_HEAD, _AXIS, _LEGEND, _LEFT, _PAD = 24, 18, 13, 58, 8
_NAMES, _VALUES = 110, 64  # beside bars
_ROOM = 1.08  # of the axis, by the highest value
_NARROW = 180  # no place for three times below the plot
# Colours of Okabe and Ito, then of Tol, which colour-blind people can distinguish.
_COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#B8A500"),
    *("#332288", "#882255", "#44AA99", "#DDCC77"),
)
_STEPS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ"))
_UNITS = {"s": "s", "Bps": "B/s", "bytes": "B", "watt": "W", "ops": "/s", "reqps": "/s"}


@dataclass(frozen=True)
class Line:
    """A series of a panel."""

    name: str
    points: Points


@dataclass(frozen=True)
class Area:
    """A panel: corner and size in pixels, and the range of times of the picture."""

    x: float
    y: float
    width: float
    height: float
    begin: float
    end: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Corner and size."""
        return (self.x, self.y, self.width, self.height)


@dataclass(frozen=True)
class Frame:
    """Area of a panel's lines: corner and size in pixels, and the ranges of the axes."""

    x: float
    y: float
    width: float
    height: float
    begin: float
    end: float
    top: float

    def at(self, time: float, value: float) -> str:
        """Return the position of a value in SVG's form."""
        share = (time - self.begin) / ((self.end - self.begin) or 1)
        return f"{self.x + self.width * share:.1f},{self._height_of(value):.1f}"

    def _height_of(self, value: float) -> float:
        return self.y + self.height * (1 - min(value / self.top, 1.0))


def _frame(area: Area, top: float, in_legend: list[Line]) -> Frame:
    """Return the area between the title, the axis of values, the axis of times and the legend."""
    below = _AXIS + _LEGEND * len(_legend_lines(area, in_legend))
    return Frame(
        area.x + _LEFT,
        area.y + _HEAD,
        area.width - _LEFT - _PAD,
        area.height - _HEAD - below,
        area.begin,
        area.end,
        top,
    )


def _top_of(lines: list[Line], limits: Limits) -> float:
    """Return the end of the axis: of the values, or of the limits if all values are 0."""
    highest = max(value for one in lines for _, value in one.points)
    return _ROOM * (highest or max((value for value, _ in limits), default=1.0))


def _limits(limits: Limits, frame: Frame) -> list[str]:
    return [
        f'<polyline points="{frame.at(frame.begin, value)} {frame.at(frame.end, value)}"'
        f' fill="none" stroke="{color}" stroke-dasharray="6 4"/>'
        for value, color in limits
        if value <= frame.top
    ]


def _times(frame: Frame) -> list[str]:
    """Label the axis of times, from the begin of the picture."""
    parts = []
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        if anchor == "middle" and frame.width < _NARROW:
            continue
        moment = show((frame.end - frame.begin) * share, "s")
        x = frame.x + frame.width * share
        parts.append(text(x, frame.y + frame.height + 12, moment, size=9, anchor=anchor))
    return parts


def bars(area: Area, lines: list[Line], unit: str) -> list[str]:
    """Draw the newest value of each series as a horizontal bar."""
    x, y, width, height = area.box
    newest = {one.name: one.points[-1][1] for one in lines}
    most = max(newest.values()) or 1.0
    left, tall = x + _NAMES, min((height - _HEAD - _PAD) / len(newest), 30)
    parts = []
    for number, (name, value) in enumerate(newest.items()):
        top = y + _HEAD + tall * number
        wide = (width - _NAMES - _VALUES) * value / most
        parts += [
            text(left - 6, top + tall / 2 + 4, name, anchor="end"),
            f'<rect x="{left}" y="{top + 3:.1f}" width="{wide:.1f}" height="{tall - 6:.1f}"'
            f' fill="{_color(number)}"/>',
            text(left + wide + 5, top + tall / 2 + 4, show(value, unit)),
        ]
    return parts


def plot(
    area: Area,
    lines: list[Line],
    unit: str,
    limits: Limits = (),
    *,
    is_stacked: bool = False,
) -> list[str]:
    """Draw lines over time, with a dashed line at each limit in their range."""
    if is_stacked:
        lines = _stacked(lines)
    top = _top_of(lines, limits)
    frame = _frame(area, top, lines)
    parts = _times(frame)
    for share in (0.0, 0.5, 1.0):
        value = top / _ROOM * share
        _, _, height = frame.at(frame.begin, value).rpartition(",")
        end = frame.x + frame.width
        parts.append(f'<line x1="{frame.x}" x2="{end}" y1="{height}" y2="{height}" stroke="#eee"/>')
        parts.append(text(frame.x - 5, float(height) + 4, show(value, unit), anchor="end"))
    order = list(enumerate(lines))
    for number, one in reversed(order):  # lower series of a stack are in front
        path = " ".join(frame.at(time, value) for time, value in one.points)
        fill = "none"
        if is_stacked:
            fill = _color(number)
            begin, end_at = one.points[0][0], one.points[-1][0]
            path = f"{frame.at(begin, 0)} {path} {frame.at(end_at, 0)}"
        parts.append(
            f'<polyline points="{path}" fill="{fill}" stroke="{_color(number)}"'
            ' stroke-width="1.5"/>'
        )
    return [*parts, *_limits(limits, frame), *_legend(area, lines)]


def _stacked(lines: list[Line]) -> list[Line]:
    """Return the lines stacked on each other."""
    below: dict[float, float] = {}
    made = []
    for one in lines:
        for time, value in one.points:
            below[time] = below.get(time, 0.0) + value
        made.append(Line(one.name, [(time, below[time]) for time, _ in one.points]))
    return made


def states(area: Area, lines: list[Line]) -> list[str]:
    """Draw when each series existed."""
    frame = _frame(area, 1.0, lines)
    parts = []
    for number, one in enumerate(lines):
        begin, end = (frame.at(one.points[which][0], 0).split(",")[0] for which in (0, -1))
        width = max(float(end) - float(begin), 2)
        parts.append(
            f'<rect x="{begin}" y="{frame.y}" width="{width:.1f}" height="{frame.height}"'
            f' fill="{_color(number)}"/>'
        )
    return [*parts, *_times(frame), *_legend(area, lines)]


def heatmap(area: Area, lines: list[Line], unit: str) -> list[str]:
    """Draw the count of each bucket without the bucket below."""
    bounds = sorted(lines, key=lambda one: float(one.name))
    frame = _frame(area, 1.0, [])
    counts: dict[tuple[int, float], float] = {}
    below: dict[float, float] = {}
    for number, one in enumerate(bounds):
        for time, value in one.points:
            counts[number, time] = max(value - below.get(time, 0.0), 0.0)
            below[time] = value
    most = max(counts.values()) or 1.0
    used = [number for (number, _), count in counts.items() if count > 0.01 * most]
    low, high = min(used), max(used)
    times = sorted(below)
    wide = frame.width / ((frame.end - frame.begin) or 1) * (times[-1] - times[0]) / len(times)
    tall = frame.height / (high - low + 1)
    parts = _times(frame)
    for number in range(low, high + 1):
        y = frame.y + frame.height - tall * (number - low + 1)
        bound = float(bounds[number].name)
        label = show(bound, unit) if math.isfinite(bound) else "more"
        parts.append(text(frame.x - 5, y + tall / 2 + 4, label, anchor="end"))
        parts += [
            f'<rect x="{frame.at(time, 0).split(",")[0]}" y="{y:.1f}" width="{wide:.1f}"'
            f' height="{tall:.1f}" fill="#D55E00" fill-opacity="{share:.2f}"/>'
            for time in times[:-1]
            if (share := counts.get((number, time), 0.0) / most) > 0.01
        ]
    return parts


def _legend_lines(area: Area, lines: list[Line]) -> list[list[int]]:
    """Return the numbers of the series in each line of the legend."""
    x, _, width, _ = area.box
    found: list[list[int]] = []
    left = x + width
    for number, one in enumerate(lines):
        wide = _legend_width(one)
        if left + wide > x + width - _PAD:
            found.append([])
            left = x + _PAD
        found[-1].append(number)
        left += wide
    return found


def _legend_width(line: Line) -> float:
    return 20 + 5.7 * len(line.name)


def _legend(area: Area, lines: list[Line]) -> list[str]:
    x, y, _, height = area.box
    rows, parts = _legend_lines(area, lines), []
    for place, numbers in enumerate(rows):
        left, bottom = x + _PAD, y + height - 6 - _LEGEND * (len(rows) - 1 - place)
        for number in numbers:
            mark = f'x="{left:.1f}" y="{bottom - 6:.1f}" width="10" height="3"'
            parts.append(f'<rect {mark} fill="{_color(number)}"/>')
            parts.append(text(left + 13, bottom, lines[number].name, size=9))
            left += _legend_width(lines[number])
    return parts


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def show(value: float, unit: str) -> str:
    """Return a value with its unit, in three digits."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s" and value >= 100:
        return f"{value / 60:.3g} min" if value < 6000 else f"{value / 3600:.3g} h"
    if value == 0 or unit == "sci" or (abs(value) < 1 and unit not in _UNITS):
        return f"{value:.3g}"
    size, letter = next((one for one in _STEPS if abs(value) >= one[0]), _STEPS[-1])
    return f"{value / size:.3g} {letter}{_UNITS.get(unit, '')}".rstrip()


def text(
    x: float, y: float, words: str, size: int = 11, weight: str = "normal", anchor: str = "start"
) -> str:
    """Return a text at a position."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}"'
        f' text-anchor="{anchor}">{escape(words)}</text>'
    )

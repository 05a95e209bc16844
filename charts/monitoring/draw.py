"""Draw a dashboard without Grafana, from its JSON and query results of a Prometheus.

Positions, titles, units and legends are the dashboard's; the style of lines is defined here.
`tests/support/charts/pictures.py` queries, and writes `docs/how-to/*.svg`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]
Ask = Callable[[str], Sequence[tuple[Mapping[str, str], Points]]]
"""Returns the series of a query over the time range of the picture, with their labels."""

CELL_WIDTH, CELL_HEIGHT = 48, 26
_HEAD, _FOOT, _LEFT, _PAD = 24, 34, 52, 8
# Colours of Okabe and Ito, which colour-blind people can distinguish.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F", "#B8A500")
_STEPS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ"))
_UNITS = {"s": "s", "Bps": "B/s", "bytes": "B", "watt": "W", "ops": "/s", "reqps": "/s"}


@dataclass(frozen=True)
class Line:
    """A series of a panel."""

    name: str
    points: Points


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


def draw(board: Mapping[str, Any], rows: Sequence[str], ask: Ask) -> str:
    """Return an SVG of some rows of a dashboard, each with all of its panels."""
    shown = _panels_of(board, rows)
    first = min(one["gridPos"]["y"] for one in shown)
    last = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in shown)
    width, height = 24 * CELL_WIDTH, (last - first) * CELL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#f4f5f6"/>',
    ]
    for one in shown:
        place = one["gridPos"]
        x, y = place["x"] * CELL_WIDTH, (place["y"] - first) * CELL_HEIGHT
        if one["type"] == "row":
            parts.append(_text(x + _PAD, y + 18, one["title"], size=14, weight="bold"))
            continue
        box = (x + 3, y + 3, place["w"] * CELL_WIDTH - 6, place["h"] * CELL_HEIGHT - 6)
        parts += _panel(one, box, _lines(one, ask))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panels_of(board: Mapping[str, Any], rows: Sequence[str]) -> list[dict[str, Any]]:
    shown, is_in = [], False
    for one in board["panels"]:
        if one["type"] == "row":
            is_in = one["title"] in rows
        if is_in:
            shown.append(one)
    return shown


def _lines(panel: Mapping[str, Any], ask: Ask) -> list[Line]:
    """Return the panel's series with their legends."""
    found = []
    for target in panel["targets"]:
        for labels, points in ask(target["expr"]):
            known = [(time, value) for time, value in points if math.isfinite(value)]
            if known:
                found.append(Line(_named(target, labels), known))
    return sorted(found, key=lambda one: one.name)


def _named(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Return the legend of a series; for a table, which has no legend, all its labels."""
    legend = target.get("legendFormat")
    if legend is None:
        return ", ".join(labels.values())
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend)


def _panel(
    panel: Mapping[str, Any], box: tuple[float, float, float, float], lines: list[Line]
) -> list[str]:
    x, y, width, height = box
    unit = panel["fieldConfig"]["defaults"]["unit"]
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#fff" stroke="#ddd"/>',
        _text(x + _PAD, y + 16, panel["title"], weight="bold"),
    ]
    if not lines:
        return [*parts, _text(x + width / 2, y + height / 2, "No data", anchor="middle")]
    match panel["type"]:
        case "stat":
            newest = show(lines[0].points[-1][1], unit)
            return [*parts, _text(x + width / 2, y + height / 2 + 16, newest, 26, anchor="middle")]
        case "state-timeline":
            return [*parts, *_states(box, lines)]
        case "heatmap":
            return [*parts, *_heatmap(box, lines, unit)]
        case "table":
            rows = [f"{one.name}: {show(one.points[-1][1], unit)}" for one in lines]
            return [*parts, *(_text(x + _PAD, y + 36 + 16 * n, row) for n, row in enumerate(rows))]
    is_stacked = "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})
    return [*parts, *_plot(box, lines, unit, is_stacked=is_stacked)]


def _frame(box: tuple[float, float, float, float], lines: list[Line], top: float) -> Frame:
    x, y, width, height = box
    times = [time for one in lines for time, _ in one.points]
    return Frame(
        x + _LEFT,
        y + _HEAD,
        width - _LEFT - _PAD,
        height - _HEAD - _FOOT,
        min(times),
        max(times),
        top,
    )


def _plot(
    box: tuple[float, float, float, float], lines: list[Line], unit: str, *, is_stacked: bool
) -> list[str]:
    if is_stacked:
        lines = _stacked(lines)
    top = 1.08 * max(value for one in lines for _, value in one.points) or 1.0
    frame = _frame(box, lines, top)
    parts = []
    for share in (0.0, 0.5, 1.0):
        value = top / 1.08 * share
        _, _, height = frame.at(frame.begin, value).rpartition(",")
        end = frame.x + frame.width
        parts.append(f'<line x1="{frame.x}" x2="{end}" y1="{height}" y2="{height}" stroke="#eee"/>')
        parts.append(_text(frame.x - 5, float(height) + 4, show(value, unit), anchor="end"))
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
    return [*parts, *_legend(box, [one.name for one in lines])]


def _stacked(lines: list[Line]) -> list[Line]:
    """Return the lines stacked on each other."""
    below: dict[float, float] = {}
    made = []
    for one in lines:
        for time, value in one.points:
            below[time] = below.get(time, 0.0) + value
        made.append(Line(one.name, [(time, below[time]) for time, _ in one.points]))
    return made


def _states(box: tuple[float, float, float, float], lines: list[Line]) -> list[str]:
    frame = _frame(box, lines, 1.0)
    parts = []
    for number, one in enumerate(lines):
        begin, end = (frame.at(one.points[which][0], 0).split(",")[0] for which in (0, -1))
        width = max(float(end) - float(begin), 2)
        parts.append(
            f'<rect x="{begin}" y="{frame.y}" width="{width:.1f}" height="{frame.height}"'
            f' fill="{_color(number)}"/>'
        )
    return [*parts, *_legend(box, [one.name for one in lines])]


def _heatmap(box: tuple[float, float, float, float], lines: list[Line], unit: str) -> list[str]:
    """Draw the count of each bucket without the bucket below."""
    bounds = sorted(lines, key=lambda one: float(one.name))
    frame = _frame(box, lines, 1.0)
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
    wide, tall = frame.width / len(times), frame.height / (high - low + 1)
    parts = []
    for number in range(low, high + 1):
        y = frame.y + frame.height - tall * (number - low + 1)
        bound = float(bounds[number].name)
        label = show(bound, unit) if math.isfinite(bound) else "more"
        parts.append(_text(frame.x - 5, y + tall / 2 + 4, label, anchor="end"))
        parts += [
            f'<rect x="{frame.x + wide * place:.1f}" y="{y:.1f}" width="{wide:.1f}"'
            f' height="{tall:.1f}" fill="#D55E00" fill-opacity="{share:.2f}"/>'
            for place, time in enumerate(times)
            if (share := counts.get((number, time), 0.0) / most) > 0.01
        ]
    return parts


def _legend(box: tuple[float, float, float, float], names: list[str]) -> list[str]:
    x, y, width, height = box
    left, parts = x + _PAD, []
    for number, name in enumerate(names):
        wide = 14 + 5.2 * len(name)
        if left + wide > x + width - 8:
            parts.append(_text(left, y + height - 12, "…", size=9))
            break
        mark = f'x="{left}" y="{y + height - 18}" width="10" height="3"'
        parts.append(f'<rect {mark} fill="{_color(number)}"/>')
        parts.append(_text(left + 13, y + height - 12, name, size=9))
        left += wide + 6
    return parts


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def show(value: float, unit: str) -> str:
    """Return a value with its unit, in three digits."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if value == 0 or unit == "sci" or (abs(value) < 1 and unit not in _UNITS):
        return f"{value:.3g}"
    size, letter = next((one for one in _STEPS if abs(value) >= one[0]), _STEPS[-1])
    return f"{value / size:.3g} {letter}{_UNITS.get(unit, '')}".rstrip()


def _text(
    x: float, y: float, text: str, size: int = 11, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )

"""Draw a dashboard without Grafana, from its JSON and query results of a Prometheus.

Positions, titles, units, limits and legends are the dashboard's; `plots.py` defines the style.
`tests/support/charts/pictures.py` queries, and writes `docs/how-to/*.svg`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monitoring import plots
from monitoring.plots import Area, Line, Points, show, text

Ask = Callable[[str], Sequence[tuple[Mapping[str, str], Points]]]
"""Returns the series of a query over the time range of the picture, with their labels."""

CELL_WIDTH, CELL_HEIGHT = 48, 26
_PAD = 8


def draw(board: Mapping[str, Any], rows: Sequence[str], ask: Ask) -> str:
    """Return an SVG of some rows of a dashboard, each with all of its panels."""
    shown = _panels_of(board, rows)
    lines = {one["id"]: _lines(one, ask) for row in shown for one in row}
    times = [time for found in lines.values() for one in found for time, _ in one.points]
    span = (min(times, default=0.0), max(times, default=0.0))
    parts, width, bottom = [], 24 * CELL_WIDTH, 0
    for row in shown:
        top = row[0]["gridPos"]["y"]
        for one in row:
            place = one["gridPos"]
            x, y = place["x"] * CELL_WIDTH, bottom + (place["y"] - top) * CELL_HEIGHT
            if one["type"] == "row":
                parts.append(text(x + _PAD, y + 18, one["title"], size=14, weight="bold"))
                continue
            box = (x + 3, y + 3, place["w"] * CELL_WIDTH - 6, place["h"] * CELL_HEIGHT - 6)
            parts += _panel(one, Area(*box, *span), lines[one["id"]])
        last = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in row)
        bottom += (last - top) * CELL_HEIGHT
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}"'
        ' font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{bottom}" fill="#f4f5f6"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _panels_of(board: Mapping[str, Any], rows: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return each row with its panels; a collapsed row has them inside."""
    found: list[list[dict[str, Any]]] = []
    for one in board["panels"]:
        if one["type"] == "row":
            found.append([one, *one["panels"]])
        else:
            found[-1].append(one)
    return [row for row in found if row[0]["title"] in rows]


def _lines(panel: Mapping[str, Any], ask: Ask) -> list[Line]:
    """Return the panel's series with their legends, by name, and of one name as queried."""
    found = []
    for target in panel.get("targets", ()):
        for labels, points in ask(target["expr"]):
            known = [(time, value) for time, value in points if math.isfinite(value)]
            if known:
                found.append(Line(_named(target, labels), known))
    return sorted(found, key=lambda one: one.name)


def _named(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Return the legend of a series; for a table, which has no legend, its labels."""
    legend = target.get("legendFormat")
    if legend is None:
        return ", ".join(f"{name} {value}" for name, value in labels.items())
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend)


def _panel(panel: Mapping[str, Any], area: Area, lines: list[Line]) -> list[str]:
    x, y, width, height = area.box
    unit = panel["fieldConfig"]["defaults"]["unit"]
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#fff" stroke="#ddd"/>',
        text(x + _PAD, y + 16, panel["title"], weight="bold"),
    ]
    if not lines:
        return [*parts, text(x + width / 2, y + height / 2, "No data", anchor="middle")]
    match panel["type"]:
        case "stat":
            newest = show(lines[0].points[-1][1], unit)
            return [*parts, text(x + width / 2, y + height / 2 + 16, newest, 26, anchor="middle")]
        case "state-timeline":
            return [*parts, *plots.states(area, lines)]
        case "heatmap":
            return [*parts, *plots.heatmap(area, lines, unit)]
        case "bargauge":
            return [*parts, *plots.bars(area, lines, unit)]
        case "table":
            names = [one.name for one in lines]
            return [*parts, *(text(x + _PAD, y + 36 + 16 * n, row) for n, row in enumerate(names))]
    defaults = panel["fieldConfig"]["defaults"]
    custom, limits = defaults.get("custom", {}), []
    if "thresholdsStyle" in custom:
        _, *steps = defaults["thresholds"]["steps"]
        limits = [(one["value"], one["color"]) for one in steps]
    return [*parts, *plots.plot(area, lines, unit, limits, is_stacked="stacking" in custom)]

"""Read the curves of a run from rank 0's journal and buffer them until Azure ML has them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Maximum per kind of point; with four values per step, the points of both kinds are below MLflow's
# limit of 1,000 values per request.
MAX_POINTS = 150
_NAMES = {
    "step": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "learning_rate": "train/learning_rate",
        "tokens_per_second": "train/tokens_per_second",
    },
    "evaluated": {"loss": "eval/loss"},
}


class Point(NamedTuple):
    """Values of one step in the journal.

    Attributes:
        number: Running number, by which sent points can be dropped.
        time: Seconds since the epoch.
        values: By the name of the curve; finite, because JSON has no other numbers.
    """

    number: int
    step: int
    time: float
    values: Mapping[str, float]


class Thinned:
    """Bounded series of points: the newest, and every first, second, fourth... of the others."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._newest: Point | None = None
        self._stride = 1
        self._count = 0

    def add(self, point: Point) -> None:
        """Add a point; if there are too many, drop every second point from now on."""
        self._newest = point
        if self._count % self._stride == 0:
            self._points.append(point)
        self._count += 1
        if len(self._points) == MAX_POINTS:
            self._points, self._stride = self._points[::2], self._stride * 2

    @property
    def points(self) -> Sequence[Point]:
        """All buffered points, the newest last."""
        last = self._points[-1:]
        newest = [] if self._newest is None or self._newest in last else [self._newest]
        return [*self._points, *newest]

    def forget(self, last: int) -> None:
        """Drop the points up to number `last`."""
        left = [point for point in self.points if point.number > last]
        self._points, self._newest = left, left[-1] if left else None
        self._stride, self._count = 1, len(left)


class Curves:
    """Follows a growing journal and buffers unsent points, thinned out.

    Existing contents of the file belong to an earlier start and are skipped.

    Attributes:
        starts: Number of this start of the attempt, once rank 0 has claimed its folders.
    """

    def __init__(self, journal: Path) -> None:
        self.starts: int | None = None
        self._journal = journal
        self._offset = journal.stat().st_size if journal.exists() else 0
        self._count = 0
        self._series = {event: Thinned() for event in _NAMES}

    def read(self) -> None:
        """Read new complete lines."""
        try:
            file = self._journal.open("rb")
        except OSError:
            return  # not written yet, or rank 0 itself reports the error of its disk
        with file:
            file.seek(self._offset)
            lines, _, rest = file.read().rpartition(b"\n")
            self._offset = file.tell() - len(rest)
        for line in lines.splitlines():
            try:
                self._take(json.loads(line))
            except ValueError:
                continue  # truncated by a full disk

    @property
    def points(self) -> Sequence[Point]:
        """All buffered points, in the order of the journal."""
        return sorted(point for series in self._series.values() for point in series.points)

    def forget(self, last: int) -> None:
        """Drop the points up to number `last`."""
        for series in self._series.values():
            series.forget(last)

    def _take(self, event: object) -> None:
        match event:
            case {"event": "claimed", "generation": int(generation)}:
                self.starts = generation
            case {
                "event": str(kind),
                "step": int(step),
                "time": float(time),
                **fields,
            } if kind in _NAMES:
                values = {curve: fields.get(field) for field, curve in _NAMES[kind].items()}
                finite = {
                    curve: float(value)
                    for curve, value in values.items()
                    if isinstance(value, int | float) and math.isfinite(value)
                }
                self._count += 1
                self._series[kind].add(Point(self._count, step, time, finite))

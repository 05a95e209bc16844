"""The curves of a run as rank 0 writes them into its journal, kept until Azure ML has them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Of each kind; with four values a step, both stay below the 1,000 that MLflow takes at once.
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
    """What the journal says of one step.

    Attributes:
        number: Counts the points, so that those which were sent can be named.
        time: Seconds since the epoch.
        values: By the name of the curve; finite, as JSON has no word for others.
    """

    number: int
    step: int
    time: float
    values: Mapping[str, float]


class Thinned:
    """A bounded number of points: the newest, and of the others each one, each second, fourth..."""

    def __init__(self) -> None:
        self._kept: list[Point] = []
        self._newest: Point | None = None
        self._stride = 1
        self._count = 0

    def add(self, point: Point) -> None:
        """Take a point; where there are too many, every second one goes, as will those to come."""
        self._newest = point
        if self._count % self._stride == 0:
            self._kept.append(point)
        self._count += 1
        if len(self._kept) == MAX_POINTS:
            self._kept, self._stride = self._kept[::2], self._stride * 2

    @property
    def points(self) -> Sequence[Point]:
        """What is kept, the newest at the end."""
        newest = [] if self._newest is None or self._newest in self._kept[-1:] else [self._newest]
        return [*self._kept, *newest]

    def forget(self, last: int) -> None:
        """Drop the points up to the number `last`."""
        left = [point for point in self.points if point.number > last]
        self._kept, self._newest = left, left[-1] if left else None
        self._stride, self._count = 1, len(left)


class Curves:
    """Reads a journal that grows, and keeps the points that nobody has taken yet, thinned.

    What was in the file before is of an earlier start, and is not read.

    Attributes:
        starts: Which start of the attempt this is, once rank 0 has claimed its folders.
    """

    def __init__(self, journal: Path) -> None:
        self.starts: int | None = None
        self._journal = journal
        self._offset = journal.stat().st_size if journal.exists() else 0
        self._count = 0
        self._kept = {event: Thinned() for event in _NAMES}

    def read(self) -> None:
        """Read what was written since the last time; an unfinished line waits."""
        try:
            file = self._journal.open("rb")
        except OSError:
            return  # rank 0 has not got so far, or tells itself what is wrong with its disk
        with file:
            file.seek(self._offset)
            lines, _, rest = file.read().rpartition(b"\n")
            self._offset = file.tell() - len(rest)
        for line in lines.splitlines():
            try:
                self._take(json.loads(line))
            except ValueError:
                continue  # a full disk has torn it

    @property
    def points(self) -> Sequence[Point]:
        """All that are kept, in the order of the journal."""
        return sorted(point for kept in self._kept.values() for point in kept.points)

    def forget(self, last: int) -> None:
        """Drop the points up to the number `last`."""
        for kept in self._kept.values():
            kept.forget(last)

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
                self._kept[kind].add(Point(self._count, step, time, finite))

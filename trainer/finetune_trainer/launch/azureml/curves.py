"""Buffer the curves of a run until Azure ML has them, thinned out."""

from collections.abc import Sequence

from finetune_trainer.config import TrainConfig
from finetune_trainer.launch.journal_points import CURVES, JournalPoints, Point

# Maximum per kind of point; with four values per step, the points of both kinds are below MLflow's
# limit of 1,000 values per request.
MAX_POINTS = 150


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
    """Follows the journals of an attempt and buffers unsent points, thinned out.

    Existing journals belong to an earlier start and are skipped.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._journal = JournalPoints(config)
        self._series = {event: Thinned() for event in CURVES}

    @property
    def starts(self) -> int | None:
        """Number of this start of the attempt, once rank 0 has claimed its folders."""
        return self._journal.starts

    def read(self) -> None:
        """Read new complete lines."""
        for kind, point in self._journal.read():
            self._series[kind].add(point)

    @property
    def points(self) -> Sequence[Point]:
        """All buffered points, in the order of the journal."""
        return sorted(point for series in self._series.values() for point in series.points)

    def forget(self, last: int) -> None:
        """Drop the points up to number `last`."""
        for series in self._series.values():
            series.forget(last)

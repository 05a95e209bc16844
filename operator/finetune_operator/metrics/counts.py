"""What a process counts while it lives, whether it leads or not: counters and histograms.

Kept without prometheus-client, so that an operator nobody scrapes never imports it.
"""

from bisect import bisect_left
from collections.abc import Iterator

from finetune_trainer.config.metrics import Metric


class Observed:
    """What a histogram has seen.

    Attributes:
        counts: How many values each bucket has, the infinite one last; not added up.
        total: The sum of all values.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def copy(self) -> "Observed":
        """Return the same, which does not change any more."""
        made = Observed(self._bounds)
        made.counts, made.total = list(self.counts), self.total
        return made


class Counts:
    """Counters and histograms, by their metric and the values of its labels."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Observed]] = {}

    def add(self, metric: Metric, *values: str, amount: float = 1.0) -> None:
        """Let a counter grow; an amount of 0 puts it on the page, so that its first step shows."""
        series = self._counters.setdefault(metric.name, {})
        series[values] = series.get(values, 0.0) + amount

    def observe(self, metric: Metric, *values: str, value: float) -> None:
        """Count one value of a histogram."""
        self.prepare(metric, *values).observe(value)

    def prepare(self, metric: Metric, *values: str) -> Observed:
        """Return a histogram; it is on the page from now on."""
        series = self._histograms.setdefault(metric.name, {})
        if values not in series:
            series[values] = Observed(metric.buckets)
        return series[values]

    def counters(self, metric: Metric) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the series of a counter."""
        yield from self._counters.get(metric.name, {}).items()

    def histograms(self, metric: Metric) -> Iterator[tuple[tuple[str, ...], Observed]]:
        """Yield the series of a histogram."""
        yield from self._histograms.get(metric.name, {}).items()

    def copy(self) -> "Counts":
        """Return the same, which does not change any more."""
        made = Counts()
        made._counters = {name: dict(series) for name, series in self._counters.items()}
        made._histograms = {
            name: {values: one.copy() for values, one in series.items()}
            for name, series in self._histograms.items()
        }
        return made

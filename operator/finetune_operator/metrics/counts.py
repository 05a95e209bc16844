"""Counters and histograms of an operator process, whether it leads or not.

prometheus-client is imported by the first count, so that it does not delay the start of `ftctl
run`.
"""

from typing import TYPE_CHECKING

from finetune_trainer.config.metrics import Metric

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram
    from prometheus_client.core import Metric as Family


class Counts:
    """Counters and histograms by metric, without a registry, so that tests can run several."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}

    def add(self, metric: Metric, *values: str, amount: float = 1.0) -> None:
        """Increase a counter; an amount of 0 exports the series before its first increase."""
        from prometheus_client import Counter

        if metric.name not in self._counters:
            self._counters[metric.name] = Counter(
                metric.name, metric.help, metric.label_names, registry=None
            )
        self._counters[metric.name].labels(*values).inc(amount)

    def observe(self, metric: Metric, *values: str, value: float) -> None:
        """Add a value to a histogram."""
        self.prepare(metric, *values).observe(value)

    def prepare(self, metric: Metric, *values: str) -> "Histogram":
        """Return a histogram, which is exported from now on even if it is empty."""
        from prometheus_client import Histogram

        if metric.name not in self._histograms:
            self._histograms[metric.name] = Histogram(
                metric.name, metric.help, metric.label_names, buckets=metric.buckets, registry=None
            )
        return self._histograms[metric.name].labels(*values)

    def family(self, metric: Metric) -> "Family | None":
        """Return all series of a metric; None if it was never counted.

        The `_created` series that prometheus-client adds are left out.
        """
        found = self._counters.get(metric.name) or self._histograms.get(metric.name)
        if found is None:
            return None
        (family,) = found.collect()
        family.samples = [
            sample for sample in family.samples if not sample.name.endswith("_created")
        ]
        return family

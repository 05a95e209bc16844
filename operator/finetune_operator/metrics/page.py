"""The operator's metrics as Prometheus reads them: the catalogue's, and nothing else.

`kernel/health.py` serves it. A page is rendered in a thread from a snapshot, as that of many jobs
takes longer than the event loop may stand still; prometheus-client is imported by the first scrape.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from finetune_operator import __version__
from finetune_operator.metrics import catalogue
from finetune_operator.metrics.counts import Counts
from finetune_operator.metrics.jobs import JobNow, Series
from finetune_trainer.config.metrics import Metric, MetricType

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

_OF_JOB = tuple(label.name for label in catalogue.OF_JOB)


@dataclass(frozen=True)
class QueueNow:
    """The queue of a leader."""

    depth: int = 0
    oldest_seconds: float = 0.0
    backlog: int = 0


@dataclass(frozen=True)
class Snapshot:
    """All that a page shows, which nobody changes any more.

    Attributes:
        calls: Requests to the API server, by verb, resource and status.
        counts: What the process has counted.
        queue: None in a replica that does not lead.
        jobs: Those that a leader sees.
    """

    calls: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    queue: QueueNow | None = None
    jobs: Sequence[JobNow] = ()


def render(snapshot: Snapshot) -> bytes:
    """Return the page in the Prometheus text format."""
    from prometheus_client import generate_latest
    from prometheus_client.registry import Collector

    @dataclass(frozen=True)
    class Only(Collector):
        family: "Family"

        def collect(self) -> "Iterator[Family]":
            yield self.family

    # One metric after the other: the lines of all at once would take three times the page.
    return b"".join([generate_latest(Only(family)) for family in _families(snapshot)])


def _families(snapshot: Snapshot) -> "Iterator[Family]":
    """Yield the metrics that have a value, one at a time, in the catalogue's order."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for metric in catalogue.ALL:
        if metric.type is MetricType.HISTOGRAM:
            family = _histogram(metric, snapshot.counts)
        else:
            make = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
            family = make(metric.name, metric.help, labels=metric.label_names)
            for values, value in _series(metric, snapshot):
                family.add_metric(values, value)
        if family.samples:
            yield family


def _histogram(metric: Metric, counts: Counts) -> "Family":
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.label_names)
    bounds = [*map(str, metric.buckets), "+Inf"]
    for values, seen in counts.histograms(metric):
        buckets = list(zip(bounds, accumulate(seen.counts), strict=True))
        family.add_metric(values, buckets, seen.total)
    return family


def _series(metric: Metric, snapshot: Snapshot) -> Series:
    """Yield each series of a counter or gauge: the values of its labels, and its value."""
    if metric is catalogue.BUILD_INFO:
        yield (__version__,), 1.0
    elif metric is catalogue.LEADER:
        yield (), float(snapshot.queue is not None)
    elif metric is catalogue.API_REQUESTS:
        for (verb, resource, status), count in snapshot.calls.items():
            yield (verb, resource, str(status)), count
    elif metric.label_names[:2] == _OF_JOB:
        for job in snapshot.jobs:
            for values, value in job.series(metric):
                yield (*job.labels, *values), value
    elif snapshot.queue is not None and metric is catalogue.QUEUE_DEPTH:
        yield (), snapshot.queue.depth
    elif snapshot.queue is not None and metric is catalogue.QUEUE_OLDEST:
        yield (), snapshot.queue.oldest_seconds
    elif snapshot.queue is not None and metric is catalogue.BACKLOG:
        yield (), snapshot.queue.backlog
    else:
        yield from snapshot.counts.counters(metric)

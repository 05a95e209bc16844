"""The operator's metrics page: the metrics of the catalogue in the Prometheus text format.

`kernel/health.py` serves the page. It is rendered in a thread, because rendering many jobs takes
longer than the event loop may be blocked. Only `render` imports prometheus-client.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from finetune_operator import __version__
from finetune_operator.metrics import catalogue
from finetune_operator.metrics.counts import Counts
from finetune_operator.metrics.job_values import JobNow, Series
from finetune_trainer.config.metrics import Metric, MetricType

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

MAX_LABEL = 256
"""Most characters of the value of a label."""

_OF_JOBS = (*catalogue.OF_JOBS, *catalogue.OF_RANK_ZERO)
_OF_JOB = tuple(label.name for label in catalogue.OF_JOB)


@dataclass(frozen=True)
class QueueNow:
    """The queue of a leader."""

    depth: int = 0
    oldest_seconds: float = 0.0
    backlog: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The content of a page; only `counts` may change while it is rendered.

    Attributes:
        calls: Requests to the API server, by verb, resource and status.
        counts: Counters and histograms of the process, which are thread-safe.
        queue: None in a replica that does not lead.
        jobs: Jobs that a leader sees.
        not_shown: Number of jobs without series, by namespace; `render` counts them.
        max_series: Most series of the jobs of one namespace.
    """

    calls: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    queue: QueueNow | None = None
    jobs: Sequence[JobNow] = ()
    not_shown: Mapping[str, int] = field(default_factory=dict)
    max_series: int = catalogue.MAX_SERIES


def render(snapshot: Snapshot) -> bytes:
    """Return the page in the Prometheus text format."""
    from prometheus_client import generate_latest
    from prometheus_client.registry import Collector

    @dataclass(frozen=True)
    class Single(Collector):
        family: "Family"

        def collect(self) -> "Iterator[Family]":
            yield self.family

    jobs, not_shown = _shown(snapshot)
    snapshot = replace(snapshot, jobs=jobs, not_shown=not_shown)
    # One metric at a time: the lines of all metrics at once would take three times the memory of
    # the page.
    return b"".join([generate_latest(Single(family)) for family in _families(snapshot)])


def _shown(snapshot: Snapshot) -> tuple[list[JobNow], dict[str, int]]:
    """Return the jobs to show, and the number of others by namespace.

    Without a limit one namespace could fill the page until Prometheus drops the whole page.
    """
    shown, omitted, num_series = list[JobNow](), Counter[str](), Counter[str]()
    for job in sorted(snapshot.jobs, key=_precedence):
        namespace, _ = job.labels
        if namespace not in omitted:
            whole = job.unpacked()
            num_series[namespace] += sum(1 for metric in _OF_JOBS for _ in whole.series(metric))
            if num_series[namespace] <= snapshot.max_series:
                shown.append(whole)
                continue
        omitted[namespace] += 1
    return shown, dict(omitted)


def _precedence(job: JobNow) -> tuple[bool, datetime, tuple[str, str]]:
    return (job.ledger.is_closed, job.ledger.created, job.labels)


def _families(snapshot: Snapshot) -> "Iterator[Family]":
    """Yield the metrics that have a value, one at a time, in the catalogue's order."""
    for metric in catalogue.ALL:
        family = snapshot.counts.family(metric) or _current(metric, snapshot)
        if family.samples:
            yield family


def _current(metric: Metric, snapshot: Snapshot) -> "Family":
    """Return a metric that is computed for this page."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    is_counter = metric.type is MetricType.COUNTER
    kind = CounterMetricFamily if is_counter else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.label_names)
    for values, value in _series(metric, snapshot):
        family.add_metric([_label_value(text) for text in values], value)
    return family


def _label_value(text: str) -> str:
    """Return the value of a label, cut at `MAX_LABEL` characters."""
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 3]}..."


def _series(metric: Metric, snapshot: Snapshot) -> Series:
    """Yield each series of a counter or gauge: the values of its labels, and its value."""
    if metric is catalogue.BUILD_INFO:
        yield (__version__,), 1.0
    elif metric is catalogue.LEADER:
        yield (), float(snapshot.queue is not None)
    elif metric is catalogue.API_REQUESTS:
        for (verb, resource, status), count in snapshot.calls.items():
            yield (verb, resource, str(status)), count
    elif metric is catalogue.JOBS_NOT_SHOWN:
        for namespace, count in snapshot.not_shown.items():
            yield (namespace,), count
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

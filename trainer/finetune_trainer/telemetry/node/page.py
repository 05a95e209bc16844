"""Render the metrics page of a node, in the order of the catalogue."""

import math
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from finetune_trainer.config import metrics
from finetune_trainer.config.metrics import Metric, MetricType, combinations
from finetune_trainer.telemetry.node.node_ranks import NodeRanks, RankNow
from finetune_trainer.telemetry.node.node_watch import NodeWatch
from finetune_trainer.telemetry.slots import layout_of_node


class RankCollector(Collector):
    """Renders the page from the shared state of the ranks at the moment of a request."""

    def __init__(self, ranks: NodeRanks, watch: NodeWatch | None = None) -> None:
        """Take numbers from `ranks` and scores from `watch`."""
        self._ranks = ranks
        self._watch = watch
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Family]:
        """Yield the metrics with a value on at least one rank, in the catalogue's order."""
        ranks = self._ranks.now()
        first = [rank for rank in ranks if rank.rank == 0]
        for metric in metrics.OF_TRAINING_NODE:
            of_ranks = first if metric.is_of_rank_zero else ranks
            family = _scores(self._watch) if metric is metrics.SCORE else _family(metric, of_ranks)
            if family.samples:
                yield family

    def render(self) -> bytes:
        """Return the page in the Prometheus text format."""
        return generate_latest(self._registry)


def _scores(watch: NodeWatch | None) -> Family:
    score = metrics.SCORE
    family = GaugeMetricFamily(score.name, score.help, labels=score.label_names)
    for rank, value in sorted(watch.scores.items()) if watch is not None else ():
        family.add_metric((str(rank),), value)
    return family


def _family(metric: Metric, ranks: list[RankNow]) -> Family:
    if metric.type is MetricType.HISTOGRAM:
        return _histograms(metric, ranks)
    make = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.label_names)
    for rank in ranks:
        for values, value in _values(metric, rank):
            if not math.isnan(value):
                family.add_metric((str(rank.rank), *values), value)
    return family


def _values(metric: Metric, rank: RankNow) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield each series of a rank: the label values after the rank, and the value."""
    if metric is metrics.INFO:
        if rank.info is not None:
            yield tuple(rank.info.values()), 1.0
        return
    if metric is metrics.LAST_SEEN_AGE:
        yield (), rank.age_seconds
        return
    if metric is metrics.PHASE_SECONDS:
        yield from (((phase.value,), seconds) for phase, seconds in rank.phase_seconds.items())
        return
    for values in combinations(metric.labels[1:]):
        if metric is metrics.MEMORY and values == ("host_rss",):  # from the kernel
            if rank.resident_bytes is not None:
                yield values, rank.resident_bytes
        else:
            yield values, rank.numbers[layout_of_node().place(metric, *values)]


def _histograms(metric: Metric, ranks: list[RankNow]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.label_names)
    bounds = [*map(str, metric.buckets), "+Inf"]
    for rank in ranks:
        for values in combinations(metric.labels[1:]):
            at = layout_of_node().place(metric, *values)
            *counts, total = rank.numbers[at : at + len(bounds) + 1]
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric((str(rank.rank), *values), buckets, total)
    return family

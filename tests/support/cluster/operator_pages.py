"""The operator's page of metrics, read as Prometheus does and held against the catalogue."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from finetune_operator.metrics import catalogue
from finetune_trainer.config.metrics import Metric, MetricType

DECLARED = catalogue.ALL
_SUFFIXES = ("_bucket", "_count", "_sum")
_BY_SAMPLE = {
    f"{one.name}{suffix}": one
    for one in DECLARED
    for suffix in (_SUFFIXES if one.type is MetricType.HISTOGRAM else ("",))
}


@dataclass(frozen=True)
class Sample:
    """One line of a page; `le` of a bucket is one of its labels."""

    metric: Metric
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class OperatorPage:
    """One answer of the page."""

    samples: tuple[Sample, ...]

    @property
    def metrics(self) -> set[Metric]:
        """What it has a value of."""
        return {one.metric for one in self.samples}

    def values(self, metric: Metric, label: str, **labels: str) -> dict[str, float]:
        """Return the values of a metric's series that have these labels, by another label."""
        found = (one for one in self.samples if one.name == metric.name)
        return {
            one.labels[label]: one.value for one in found if labels.items() <= one.labels.items()
        }

    def value(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """Return the value of the one series that has these labels."""
        name = metric.name + suffix
        (found,) = (
            one.value
            for one in self.samples
            if one.name == name and labels.items() <= one.labels.items()
        )
        return found


def read_page(text: str) -> OperatorPage:
    """Return what a page has.

    Raises:
        AssertionError: the catalogue does not declare a name, a label or its value.
    """
    return OperatorPage(tuple(_samples(text)))


def _samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        for line in family.samples:
            metric = _BY_SAMPLE.get(line.name)
            assert metric is not None, f"{line.name} is not declared"
            assert family.documentation == metric.help
            names = {name for name in line.labels if name != "le"}
            assert names == set(metric.label_names), line
            for label in metric.labels:
                allowed = label.values
                assert not allowed or line.labels[label.name] in allowed, line
            yield Sample(metric, line.name, dict(line.labels), line.value)

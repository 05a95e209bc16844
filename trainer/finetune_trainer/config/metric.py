"""Define `Metric`; the metrics themselves are in `metrics`."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class MetricType(StrEnum):
    """Type of a metric in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Needs(StrEnum):
    """Requirement for a metric to have a value."""

    NOTHING = "nothing"
    GPU = "a GPU"
    NCCL = "NCCL"


@dataclass(frozen=True)
class Label:
    """A label of a metric.

    Attributes:
        values: All possible values; empty if only the run knows them, such as a version.
        of_gpu: Values that need a GPU.
    """

    name: str
    values: tuple[str, ...] = ()
    of_gpu: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        name: Name on the page; a counter's name ends with `_total`.
        unit: Unit of its values, in the plural; for a counter, the name of the counted things.
        labels: Labels in the order of the page.
        buckets: Ascending upper bounds of a histogram, without the last, infinite one.
        is_of_rank_zero: Only rank 0 has it; otherwise every rank has its own.
        most_series: Maximum number of series per rank, if the run decides which series exist. Each
            series, also of a counter, then appears with its first value. None if all combinations
            of labels exist.
        is_unknown_at_first: A counter that appears only when there is something to count.
    """

    name: str
    type: MetricType
    unit: str
    help: str
    labels: tuple[Label, ...]
    buckets: tuple[float, ...] = ()
    needs: Needs = Needs.NOTHING
    is_of_rank_zero: bool = False
    most_series: int | None = None
    is_unknown_at_first: bool = False

    @property
    def starts_absent(self) -> bool:
        """Whether it is absent before its value is known; otherwise it starts at 0."""
        is_gauge = self.type is MetricType.GAUGE
        is_known_late = self.is_sparse or self.is_unknown_at_first
        return is_gauge or is_known_late or self.needs is not Needs.NOTHING

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of its labels, in the page's order."""
        return tuple(label.name for label in self.labels)

    @property
    def is_sparse(self) -> bool:
        """Whether the run decides which series exist."""
        return self.most_series is not None


RANK = Label("rank")


def combinations(labels: tuple[Label, ...]) -> tuple[tuple[str, ...], ...]:
    """Return each combination of the labels' values; empty if a label's values are not known."""
    return tuple(product(*(label.values for label in labels)))

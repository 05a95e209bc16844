"""What a metric is: `Metric`. Those that there are stand in `metrics`."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class MetricType(StrEnum):
    """What Prometheus takes it for."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Needs(StrEnum):
    """What must be there for a metric to have a value."""

    NOTHING = "nothing"
    GPU = "a GPU"
    NCCL = "NCCL"


@dataclass(frozen=True)
class Label:
    """A label of a metric.

    Attributes:
        values: all that it can have; none where only the run knows them, such as a version.
        of_gpu: those of them that need a GPU.
    """

    name: str
    values: tuple[str, ...] = ()
    of_gpu: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as on the page; a counter's ends with `_total`.
        unit: of its values, in the plural; the word of what is counted, for a counter of things.
        labels: those of the page, in its order.
        buckets: upper bounds of a histogram, rising, without the last, infinite one.
        is_of_rank_zero: rank 0 alone knows it; else each rank has its own.
        most_series: of a rank, where the run decides which there are; each then appears with its
            first value, a counter as well. None: all combinations of labels are there.
        is_unknown_at_first: a counter that is there only once there is something to count.
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
        """Whether it is not there before its value is known; else it begins at 0."""
        is_gauge = self.type is MetricType.GAUGE
        is_known_late = self.is_sparse or self.is_unknown_at_first
        return is_gauge or is_known_late or self.needs is not Needs.NOTHING

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of its labels, in the page's order."""
        return tuple(label.name for label in self.labels)

    @property
    def is_sparse(self) -> bool:
        """Whether the run decides which series there are."""
        return self.most_series is not None


RANK = Label("rank")


def combinations(labels: tuple[Label, ...]) -> tuple[tuple[str, ...], ...]:
    """Return each combination of the labels' values; none where a label's values are not known."""
    return tuple(product(*(label.values for label in labels)))

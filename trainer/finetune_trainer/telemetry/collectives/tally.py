"""Sum collectives in a rank's block; all observers of collectives count here.

No locks are needed, because one thread begins and ends the collectives of a group, and each group
has its own numbers.
"""

from typing import TYPE_CHECKING

from finetune_trainer.config import metrics
from finetune_trainer.telemetry.collectives.sample import Sample, bus_factor, size_class

if TYPE_CHECKING:
    from finetune_trainer.telemetry.slots import Block


class Tally:
    """Sums for one operation, group and size class."""

    __slots__ = ("_bus", "_bus_factor", "_bytes", "_calls", "_exposed", "_numbers", "_seconds",
                 "num_calls", "num_timed")  # fmt: skip

    def __init__(self, block: "Block", labels: tuple[str, str, str], num_ranks: int) -> None:
        """Look up the numbers; `labels` are operation, group and size class.

        `num_calls` and `num_timed` count this process only; the numbers in the block include
        earlier processes of this rank.
        """
        self._numbers = block.numbers
        self._bus_factor = bus_factor(labels[0], num_ranks)
        self._calls = block.place(metrics.COMM_CALLS, *labels)
        self._bytes = block.place(metrics.COMM_BYTES, *labels)
        self._bus = block.place(metrics.COMM_BUS_BYTES, *labels)
        self._seconds = block.place(metrics.COMM_SECONDS, *labels)
        self._exposed = block.place(metrics.COMM_EXPOSED, *labels)
        self.num_calls = self.num_timed = 0
        for at in (self._calls, self._bytes):
            _begin(self._numbers, at)

    def count(self, num_bytes: int, seconds: float | None) -> None:
        """Count a finished collective, with its time if known.

        Bus bytes are added only together with a time, so that their ratio is a bandwidth.
        """
        numbers = self._numbers
        self.num_calls += 1
        numbers[self._calls] += 1
        numbers[self._bytes] += num_bytes
        if seconds is None:
            return
        if self.num_timed == 0:
            _begin(numbers, self._seconds)
            _begin(numbers, self._bus)
        self.num_timed += 1
        numbers[self._seconds] += seconds
        numbers[self._bus] += num_bytes * self._bus_factor

    def expose(self, seconds: float) -> None:
        """Add time in which the rank only waited for such collectives."""
        _begin(self._numbers, self._exposed)
        self._numbers[self._exposed] += seconds


class Tallies:
    """All tallies of a rank, and how complete they are.

    Attributes:
        is_counting: Whether counting has begun.
        num_missed: Collectives of which too little is known for a tally.
    """

    def __init__(self, block: "Block") -> None:
        self._block = block
        self._tallies: dict[tuple[str, str, str], Tally] = {}
        self.is_counting = False
        self.num_missed = 0
        self._sampled = [block.place(metrics.COMM_SAMPLED, of) for of in ("bytes", "seconds")]

    def of(self, op: str, group: str, size: str, num_ranks: int) -> Tally | None:
        """Return the tally of an operation, group (of `num_ranks` ranks) and size class.

        None before counting begins, or if there are already `metrics.MOST_KINDS` tallies, which
        counts the collective as missed.
        """
        key = (op, group, size)
        found = self._tallies.get(key)
        if found is None and self.is_counting:
            if len(self._tallies) < metrics.MOST_KINDS:
                found = self._tallies[key] = Tally(self._block, key, num_ranks)
            else:
                self.num_missed += 1
        return found

    def add(self, sample: Sample) -> None:
        """Count a finished collective."""
        size = size_class(sample.num_bytes)
        tally = self.of(sample.op, sample.group, size, sample.num_ranks)
        if tally is not None:
            tally.count(sample.num_bytes, sample.seconds)

    def publish_sampled(self) -> None:
        """Publish the share of collectives that is counted, and the share that is timed."""
        tallies = list(self._tallies.values())  # another thread may add one
        counted = sum(one.num_calls for one in tallies)
        if counted == 0:
            return
        timed = sum(one.num_timed for one in tallies)
        for at, known in zip(self._sampled, (counted, timed), strict=True):
            self._block.numbers[at] = known / (counted + self.num_missed)


class Sequence:
    """Newest sequence numbers of the collectives of one group, counted from 1."""

    __slots__ = ("_completed", "_enqueued", "_newest", "_numbers")

    def __init__(self, block: "Block", group: str) -> None:
        self._numbers = block.numbers
        self._enqueued = block.place(metrics.COMM_ENQUEUED, group)
        self._completed = block.place(metrics.COMM_COMPLETED, group)
        self._newest = 0
        self.is_at(0, 0)  # a restarted rank starts at 0, like its peers

    def begin(self) -> int:
        """Count a collective that begins and return its sequence number."""
        self._newest = newest = self._newest + 1
        self._numbers[self._enqueued] = newest
        return newest

    def end(self, number: int) -> None:
        """Record that a collective and all earlier ones are finished."""
        if self._numbers[self._completed] < number:
            self._numbers[self._completed] = number

    def is_at(self, enqueued: int, completed: int) -> None:
        """Set both numbers, if they are counted elsewhere."""
        self._numbers[self._enqueued], self._numbers[self._completed] = enqueued, completed


def _begin(numbers: "memoryview[float]", at: int) -> None:
    if numbers[at] != numbers[at]:  # NaN: no value yet
        numbers[at] = 0.0

"""Adds up collectives in a rank's block; whatever sees them counts here.

Nothing here locks: the collectives of a group are begun and ended by one thread, and each group
has numbers of its own.
"""

from typing import TYPE_CHECKING

from finetune_trainer.config import metrics
from finetune_trainer.telemetry.collectives.sample import Sample, bus_factor, size_class

if TYPE_CHECKING:
    from finetune_trainer.telemetry.slots import Block


class Tally:
    """The collectives of one operation, group and size class."""

    __slots__ = ("_bus", "_bus_factor", "_bytes", "_calls", "_exposed", "_numbers", "_seconds",
                 "num_calls", "num_timed")  # fmt: skip

    def __init__(self, block: "Block", labels: tuple[str, str, str], num_ranks: int) -> None:
        """Find the numbers; `labels` are operation, group and size class.

        `num_calls` and `num_timed` are of this process, the numbers of all in this rank's place.
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
        """Count a collective that is over, with its time where that is known.

        Its bus bytes are added only with its time, so that both together are a bandwidth.
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
        """Add time in which the rank could only wait for such collectives."""
        _begin(self._numbers, self._exposed)
        self._numbers[self._exposed] += seconds


class Tallies:
    """All tallies of a rank, and how much they know.

    Attributes:
        is_counting: whether there is anything to count yet.
        num_missed: collectives of which less is known than a tally asks for.
    """

    def __init__(self, block: "Block") -> None:
        self._block = block
        self._tallies: dict[tuple[str, str, str], Tally] = {}
        self.is_counting = False
        self.num_missed = 0
        self._sampled = [block.place(metrics.COMM_SAMPLED, of) for of in ("bytes", "seconds")]

    def of(self, op: str, group: str, size: str, num_ranks: int) -> Tally | None:
        """Return the tally of an operation, group (with so many ranks) and size class.

        None where nothing is counted yet, or the collective is missed as there are
        `metrics.MOST_KINDS` others.
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
        """Count a collective that is over."""
        size = size_class(sample.num_bytes)
        tally = self.of(sample.op, sample.group, size, sample.num_ranks)
        if tally is not None:
            tally.count(sample.num_bytes, sample.seconds)

    def say_sampled(self) -> None:
        """Publish which share of all is counted, and which is timed."""
        tallies = list(self._tallies.values())  # another thread may begin one
        counted = sum(one.num_calls for one in tallies)
        if counted == 0:
            return
        timed = sum(one.num_timed for one in tallies)
        for at, known in zip(self._sampled, (counted, timed), strict=True):
            self._block.numbers[at] = known / (counted + self.num_missed)


class Sequence:
    """The newest numbers of the collectives of one group, counted from 1."""

    __slots__ = ("_completed", "_enqueued", "_newest", "_numbers")

    def __init__(self, block: "Block", group: str) -> None:
        self._numbers = block.numbers
        self._enqueued = block.place(metrics.COMM_ENQUEUED, group)
        self._completed = block.place(metrics.COMM_COMPLETED, group)
        self._newest = 0
        self.is_at(0, 0)  # a later process in this rank's place counts anew, as its peers do

    def begin(self) -> int:
        """Count one that begins, and return its number."""
        self._newest = newest = self._newest + 1
        self._numbers[self._enqueued] = newest
        return newest

    def end(self, number: int) -> None:
        """Note that one is over, and those before it."""
        if self._numbers[self._completed] < number:
            self._numbers[self._completed] = number

    def is_at(self, enqueued: int, completed: int) -> None:
        """Set both, where somebody else counts."""
        self._numbers[self._enqueued], self._numbers[self._completed] = enqueued, completed


def _begin(numbers: "memoryview[float]", at: int) -> None:
    if numbers[at] != numbers[at]:  # NaN: nothing was known yet
        numbers[at] = 0.0

"""The numbers of a rank in memory that its node's page reads: one block a rank, one place a series.

The rank writes, `node` reads, from another process and whatever the rank does; neither ever waits
for the other. A block is a small file, mapped by both:

    head                           16 bytes: a magic word, and a digest of the layout
    `Word`s                        8 bytes each, what no series shows as it is
    one number a series            8 bytes each; of a histogram one a bucket, and the sum

Numbers are doubles in the machine's own order. Each is written by one assignment to a memoryview
and so is seen whole: `struct.pack_into` on a map was seen to write 0 first.
"""

import math
import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from pathlib import Path

from finetune_trainer.config.metrics import (
    OF_TRAINING_NODE,
    PHASE_SECONDS,
    Metric,
    combinations,
)

_MAGIC = b"FTSLOTS1"
_HEAD_BYTES = 16
_NUMBER_BYTES = 8
_SNAPSHOTS_TRIED = 100  # one of the phases takes a microsecond, and a phase lasts longer


class Word(IntEnum):
    """The first numbers of a block."""

    SEEN_AT = 0  # seconds of the machine's monotonic clock
    PID = 1
    PROCESS_START = 2  # tells the process from a later one of the same number; see `processes`
    SAVES_ASKED = 3  # how often the page was asked for a checkpoint; the only number it writes
    SAVES_TAKEN = 4  # how many of these the rank has heard of
    PHASE_SWITCHES = 5  # how often the rank's phase was switched; its last bit names what is valid
    EVEN_RUNNING = 6  # the phase that runs, counted from 1; 0 is none
    EVEN_SINCE = 7  # seconds of the machine's monotonic clock
    EVEN_FIRST = 8  # the phase that its first seconds count for; 0 is itself
    EVEN_UNTIL = 9  # seconds of that clock
    EVEN_LEFT = 10  # the phase before it, counted from 1; 0 is none
    EVEN_LEFT_SECONDS = 11  # what that came to
    ODD_RUNNING = 12
    ODD_SINCE = 13
    ODD_FIRST = 14
    ODD_UNTIL = 15
    ODD_LEFT = 16
    ODD_LEFT_SECONDS = 17
    WITNESS_PID = 18  # the process that writes its stacks when it gets SIGUSR2; see `witness`
    # The end of the newest step; see `boundary`. Read in this order it is whole where the first
    # and the last are the same.
    BOUNDARIES_WRITTEN = 19
    BOUNDARY_AT = 20
    BOUNDARY_WAITING = 21
    BOUNDARY_DATA = 22
    BOUNDARY_CHECKPOINT = 23
    BOUNDARY_APART = 24
    BOUNDARIES_BEGUN = 25


_PHASE_WORDS = slice(Word.PHASE_SWITCHES, Word.ODD_LEFT_SECONDS + 1)


class Layout:
    """Where the numbers of a rank are, which follows from the metrics.

    A metric with a label whose values are not known beforehand has no place.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._places: dict[tuple[str, tuple[str, ...]], int] = {}
        self._starts_absent: list[int] = []
        digest = blake2b(digest_size=_HEAD_BYTES - len(_MAGIC))
        at = len(Word)
        for metric in metrics:
            for values in combinations(metric.labels[1:]):  # a block is of one rank
                self._places[metric.name, values] = at
                digest.update(repr((metric.name, metric.type, values, metric.buckets)).encode())
                if metric.starts_absent:
                    self._starts_absent.append(at)
                at += len(metric.buckets) + 2 if metric.buckets else 1
        self.num_numbers = at
        self.head = _MAGIC + digest.digest()

    def place(self, metric: Metric, *values: str) -> int:
        """Return the place of a series, by the values of its labels after the rank.

        Raises:
            KeyError: the metric is not declared with such a value.
        """
        return self._places[metric.name, values]

    def places(self, metric: Metric) -> slice:
        """Return the places of all series of a counter or gauge."""
        values = combinations(metric.labels[1:])
        return slice(self.place(metric, *values[0]), self.place(metric, *values[-1]) + 1)

    @property
    def num_bytes(self) -> int:
        """The size of a block."""
        return _HEAD_BYTES + _NUMBER_BYTES * self.num_numbers

    def fresh(self) -> bytes:
        """Return a block in which counters are 0, and what is not known yet is NaN."""
        numbers = memoryview(bytearray(_NUMBER_BYTES * self.num_numbers)).cast("d")
        for at in self._starts_absent:
            numbers[at] = math.nan
        return self.head + numbers.tobytes()


@cache
def layout_of_node() -> Layout:
    """Return the layout of all blocks of this version."""
    return Layout(OF_TRAINING_NODE)


class Slot:
    """The number of one counter or gauge."""

    __slots__ = ("_at", "_numbers")

    def __init__(self, numbers: "memoryview[float]", at: int) -> None:
        self._numbers, self._at = numbers, at

    def set(self, value: float) -> None:
        """Put a gauge to a value."""
        self._numbers[self._at] = value

    def begin(self) -> None:
        """Let a counter that is not there yet begin at 0."""
        if math.isnan(self._numbers[self._at]):
            self._numbers[self._at] = 0.0

    def add(self, amount: float) -> None:
        """Let a counter grow that is there; only one thread may."""
        self._numbers[self._at] += amount


class HistogramSlots:
    """The numbers of one histogram."""

    __slots__ = ("_at", "_bounds", "_numbers")

    def __init__(self, numbers: "memoryview[float]", at: int, bounds: tuple[float, ...]) -> None:
        self._numbers, self._at, self._bounds = numbers, at, bounds

    def observe(self, value: float) -> None:
        """Count one value; only one thread may."""
        self._numbers[self._at + bisect_left(self._bounds, value)] += 1
        self._numbers[self._at + len(self._bounds) + 1] += value


class Block:
    """The block of one rank, as the rank writes it and the page reads it.

    Attributes:
        numbers: all of them, by `Word` and by `Layout.place`.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)[_HEAD_BYTES : layout_of_node().num_bytes]
        self.numbers: memoryview[float] = view.cast("d")

    @classmethod
    def private(cls) -> "Block":
        """Return a block that nobody else sees, where there is no page."""
        memory = mmap.mmap(-1, layout_of_node().num_bytes)
        memory[:] = layout_of_node().fresh()
        return cls(memory)

    @classmethod
    def open(cls, path: Path) -> "Block":
        """Return the block at `path`, with the numbers that it has; a new one where there is none.

        It is written before it gets its name, as a hole in a file that the disk cannot fill would
        kill whoever writes to its map.

        Raises:
            OSError: it cannot be made.
        """
        found = cls.find(path)
        if found is None:
            made = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            made.write_bytes(layout_of_node().fresh())
            made.replace(path)
            found = cls(_map(path))
        return found

    @classmethod
    def find(cls, path: Path) -> "Block | None":
        """Return the block at `path`; None where there is none, or one of another version."""
        try:
            memory = _map(path)
        except (FileNotFoundError, ValueError):  # a file of no bytes cannot be mapped
            return None
        layout = layout_of_node()
        is_ours = len(memory) == layout.num_bytes and memory[:_HEAD_BYTES] == layout.head
        return cls(memory) if is_ours else None

    def snapshot(self) -> list[float]:
        """Return all numbers, those of the phases as they are between two switches."""
        seconds = layout_of_node().places(PHASE_SECONDS)
        numbers: list[float] = list(self.numbers)
        for _ in range(_SNAPSHOTS_TRIED):
            numbers[_PHASE_WORDS] = self.numbers[_PHASE_WORDS].tolist()
            numbers[seconds] = self.numbers[seconds].tolist()
            if self.numbers[Word.PHASE_SWITCHES] == numbers[Word.PHASE_SWITCHES]:
                break
        return numbers

    def place(self, metric: Metric, *values: str) -> int:
        """Return where in `numbers` a series is, by its labels' values after the rank."""
        return layout_of_node().place(metric, *values)

    def slot(self, metric: Metric, *values: str) -> Slot:
        """Return the number of a counter or gauge, by its labels' values after the rank."""
        return Slot(self.numbers, self.place(metric, *values))

    def histogram(self, metric: Metric, *values: str) -> HistogramSlots:
        """Return the numbers of a histogram, by its labels' values after the rank."""
        at = layout_of_node().place(metric, *values)
        return HistogramSlots(self.numbers, at, metric.buckets)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)

"""Keep the numbers of a rank in memory shared with its node's page: one block per rank.

The rank writes; the page's process reads, regardless of the rank's activity. Neither waits for the
other. A block is a small file, mapped by both:

    head                           16 bytes: a magic word, and a digest of the layout
    `Word`s                        8 bytes each, internal values that no series shows directly
    one number per series          8 bytes each; a histogram has one per bucket, and the sum

Numbers are doubles in native byte order. Each is written by one assignment to a memoryview, so that
a reader never sees a part of it. `struct.pack_into` on a map can write 0 first.
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
_SNAPSHOTS_TRIED = 100  # copying the phases takes a microsecond, and a phase lasts longer


class Word(IntEnum):
    """Indices of the first numbers of a block."""

    SEEN_AT = 0  # seconds of the machine's monotonic clock
    PID = 1
    PROCESS_START = 2  # distinguishes processes with the same PID; see `processes`
    SAVES_ASKED = 3  # checkpoints requested from the page, which writes this number
    SAVES_TAKEN = 4  # how many of them the rank has taken
    PHASE_SWITCHES = 5  # count of phase switches; the last bit selects the valid copy
    EVEN_RUNNING = 6  # current phase, counted from 1; 0 is none
    EVEN_SINCE = 7  # seconds of the machine's monotonic clock
    EVEN_FIRST = 8  # phase credited with its first seconds; 0 is itself
    EVEN_UNTIL = 9  # seconds of that clock
    EVEN_LEFT = 10  # previous phase, counted from 1; 0 is none
    EVEN_LEFT_SECONDS = 11  # total of the previous phase
    ODD_RUNNING = 12
    ODD_SINCE = 13
    ODD_FIRST = 14
    ODD_UNTIL = 15
    ODD_LEFT = 16
    ODD_LEFT_SECONDS = 17
    WITNESS_PID = 18  # process that writes its stacks on SIGUSR2; see `witness`
    # The end of the newest step; see `boundary`. A copy in this order is consistent if the first
    # and the last number are equal.
    BOUNDARIES_WRITTEN = 19
    BOUNDARY_AT = 20
    BOUNDARY_WAITING = 21
    BOUNDARY_DATA = 22
    BOUNDARY_CHECKPOINT = 23
    BOUNDARY_APART = 24
    BOUNDARIES_BEGUN = 25
    # See `profile_requests`. The page writes the first two numbers.
    PROFILES_ASKED = 26  # profiles requested from the page
    PROFILE_STEPS = 27  # steps of the newest request
    PROFILES_TAKEN = 28  # how many of the requests the rank has taken
    IS_PROFILING = 29  # 1 from the moment a request is taken, or a profile begins, to its report
    GENERATION = 30  # number of this start of the attempt, which selects the folder of its logs


_PHASE_WORDS = slice(Word.PHASE_SWITCHES, Word.ODD_LEFT_SECONDS + 1)


class Layout:
    """Places of a rank's numbers, derived from the metrics.

    A metric with a label whose values are not known beforehand has no place.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._places: dict[tuple[str, tuple[str, ...]], int] = {}
        self._starts_absent: list[int] = []
        digest = blake2b(digest_size=_HEAD_BYTES - len(_MAGIC))
        at = len(Word)
        for metric in metrics:
            for values in combinations(metric.labels[1:]):  # a block belongs to one rank
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
        """Size of a block."""
        return _HEAD_BYTES + _NUMBER_BYTES * self.num_numbers

    def fresh(self) -> bytes:
        """Return a new block with counters at 0 and unknown values NaN."""
        numbers = memoryview(bytearray(_NUMBER_BYTES * self.num_numbers)).cast("d")
        for at in self._starts_absent:
            numbers[at] = math.nan
        return self.head + numbers.tobytes()


@cache
def layout_of_node() -> Layout:
    """Return the layout of all blocks of this version."""
    return Layout(OF_TRAINING_NODE)


class Slot:
    """Number of one counter or gauge."""

    __slots__ = ("_at", "_numbers")

    def __init__(self, numbers: "memoryview[float]", at: int) -> None:
        self._numbers, self._at = numbers, at

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._numbers[self._at] = value

    def begin(self) -> None:
        """Start a counter at 0 if it does not exist yet."""
        if math.isnan(self._numbers[self._at]):
            self._numbers[self._at] = 0.0

    def add(self, amount: float) -> None:
        """Increase an existing counter; only one thread may do so."""
        self._numbers[self._at] += amount


class HistogramSlots:
    """Numbers of one histogram."""

    __slots__ = ("_at", "_bounds", "_numbers")

    def __init__(self, numbers: "memoryview[float]", at: int, bounds: tuple[float, ...]) -> None:
        self._numbers, self._at, self._bounds = numbers, at, bounds

    def observe(self, value: float) -> None:
        """Count one value; only one thread may do so."""
        self._numbers[self._at + bisect_left(self._bounds, value)] += 1
        self._numbers[self._at + len(self._bounds) + 1] += value


class Block:
    """Numbers of one rank in shared memory; the rank writes them and the node's page reads them.

    Attributes:
        numbers: All numbers, indexed by `Word` and by `Layout.place`.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)[_HEAD_BYTES : layout_of_node().num_bytes]
        self.numbers: memoryview[float] = view.cast("d")

    @classmethod
    def private(cls) -> "Block":
        """Return a block in private memory, for a rank without a page."""
        memory = mmap.mmap(-1, layout_of_node().num_bytes)
        memory[:] = layout_of_node().fresh()
        return cls(memory)

    @classmethod
    def open(cls, path: Path) -> "Block":
        """Open the block at `path` with its numbers, or create it.

        A new block is written before it gets its name, because a process is killed if it writes to
        a hole in a mapped file that the disk cannot fill.

        Raises:
            OSError: The block cannot be created.
        """
        found = cls.find(path)
        if found is None:
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(layout_of_node().fresh())
            temporary.replace(path)
            found = cls(_map(path))
        return found

    @classmethod
    def find(cls, path: Path) -> "Block | None":
        """Open the block at `path`; None if it does not exist or belongs to another version."""
        try:
            memory = _map(path)
        except (FileNotFoundError, ValueError):  # an empty file cannot be mapped
            return None
        layout = layout_of_node()
        is_ours = len(memory) == layout.num_bytes and memory[:_HEAD_BYTES] == layout.head
        return cls(memory) if is_ours else None

    def snapshot(self) -> list[float]:
        """Copy all numbers, with the phases as they are between two switches."""
        seconds = layout_of_node().places(PHASE_SECONDS)
        numbers: list[float] = list(self.numbers)
        for _ in range(_SNAPSHOTS_TRIED):
            numbers[_PHASE_WORDS] = self.numbers[_PHASE_WORDS].tolist()
            numbers[seconds] = self.numbers[seconds].tolist()
            if self.numbers[Word.PHASE_SWITCHES] == numbers[Word.PHASE_SWITCHES]:
                break
        return numbers

    def place(self, metric: Metric, *values: str) -> int:
        """Return the index of a series in `numbers`, by its labels' values after the rank."""
        return layout_of_node().place(metric, *values)

    def slot(self, metric: Metric, *values: str) -> Slot:
        """Return the slot of a counter or gauge, by its labels' values after the rank."""
        return Slot(self.numbers, self.place(metric, *values))

    def histogram(self, metric: Metric, *values: str) -> HistogramSlots:
        """Return the slots of a histogram, by its labels' values after the rank."""
        at = layout_of_node().place(metric, *values)
        return HistogramSlots(self.numbers, at, metric.buckets)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)

"""Find ranks slower than the others: busy time per step relative to the others' median. Pure.

All ranks of a synchronous run finish the same steps, so a slow rank is busy for longer while the
others wait for it in collectives. Busy time is a step's time without such waits.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median

from finetune_trainer.config import SuspectCause
from finetune_trainer.telemetry.boundary import Boundary
from finetune_trainer.telemetry.node.snapshots import Seen

_MAD_TO_SIGMA = 1.4826  # for a normal distribution
_SIGMAS = 4.0
_MIN_OTHERS_OF_SPREAD = 3
_MOST_APART = 0.1
_WINDOWS_OF_NOISE = 12
_LEAST_WINDOWS_OF_NOISE = 4
_SIGMAS_OF_NOISE = 3.0


@dataclass(frozen=True)
class SlowPace:
    """When a rank counts as slow.

    Attributes:
        window_seconds: Shortest time over which ranks are compared.
        min_steps: Fewest steps over which ranks are compared, because nodes are not sampled at the
            same moment.
        windows: Number of consecutive slow windows before a rank is named.
        slow: Lowest score of a slow rank.
        well: Highest mean score, over the same number of windows, of a rank that has recovered.
        min_share: Share of its wall time by which a slow rank is busy for longer than the others.
    """

    window_seconds: float = 5.0
    min_steps: int = 4
    windows: int = 3
    slow: float = 1.10
    well: float = 1.05
    min_share: float = 0.05


@dataclass(frozen=True)
class Slow:
    """A rank that is slow now.

    Attributes:
        score: Its busy time over the newest windows, relative to the others' median.
        since: Start of the first window in which it was slow, on the clock of the snapshots.
    """

    rank: int
    cause: SuspectCause
    score: float
    since: float


@dataclass(frozen=True)
class Use:
    """Seconds per step of one rank, over one window."""

    wall: float
    compute: float
    data: float
    checkpoint: float
    apart: float

    @property
    def busy(self) -> float:
        """All time except waiting for others."""
        return self.compute + self.data + self.checkpoint

    @classmethod
    def between(cls, first: Boundary, last: Boundary) -> "Use":
        """Return the average step of a rank between two boundaries."""
        steps = last.steps - first.steps
        waiting = last.waiting_seconds - first.waiting_seconds
        apart = last.apart_seconds - first.apart_seconds
        data = (last.data_seconds - first.data_seconds) / steps
        checkpoint = (last.checkpoint_seconds - first.checkpoint_seconds) / steps
        wall = (last.at - first.at) / steps
        compute = max(0.0, wall - (waiting + apart) / steps - data - checkpoint)
        return cls(wall, compute, data, checkpoint, apart / steps)


@dataclass
class _Record:
    """Results of one rank in the newest windows.

    Attributes:
        excesses: Seconds per step above the others, by cause, in each slow window.
        scores: Scores of the slow windows.
        newest: Scores of the newest windows, slow or not.
    """

    since: float = 0.0
    excesses: tuple[Mapping[SuspectCause, float], ...] = ()
    scores: tuple[float, ...] = ()
    newest: tuple[float, ...] = ()
    is_named: bool = False


class SlowRanks:
    """Compares ranks window by window."""

    def __init__(self, pace: SlowPace) -> None:
        self._pace = pace
        self._began = 0.0
        self._first: Mapping[int, Seen] = {}
        self._records: dict[int, _Record] = {}
        self._history: deque[Mapping[int, float]] = deque(maxlen=_WINDOWS_OF_NOISE)
        self.scores: Mapping[int, float] = {}
        """Scores of the newest window, by rank."""

    def look(self, now: float, seen: Mapping[int, Seen]) -> list[Slow]:
        """Process a snapshot and return the slow ranks, worst first."""
        pairs = {
            rank: (self._first[rank].look.boundary, one.look.boundary)
            for rank, one in seen.items()
            if rank in self._first and _is_same(self._first[rank], one)
        }
        whole = {rank: (a, b) for rank, (a, b) in pairs.items() if a is not None and b is not None}
        if len(whole) < len(self._first) or not whole:
            self._begin(now, seen)  # a rank was added, is gone or was restarted
        elif now - self._began >= self._pace.window_seconds and all(
            last.steps - first.steps >= self._pace.min_steps for first, last in whole.values()
        ):
            self._close({rank: Use.between(*both) for rank, both in whole.items()})
            self._begin(now, seen)
        named = [self._slow(rank) for rank, one in self._records.items() if one.is_named]
        return sorted(named, key=lambda one: -one.score)

    def forget(self) -> None:
        """Start over, because the run has stopped training."""
        self._first, self._records, self.scores = {}, {}, {}
        self._history.clear()

    def _begin(self, now: float, seen: Mapping[int, Seen]) -> None:
        self._began = now
        self._first = {
            rank: one
            for rank, one in seen.items()
            if one.look.boundary is not None and not one.is_silent
        }

    def _close(self, uses: Mapping[int, Use]) -> None:
        """Compare the ranks over a finished window."""
        self._records = {rank: self._records.get(rank, _Record()) for rank in uses}
        if len(uses) < 2:
            self.scores = {}
            return
        if max(use.apart / use.wall for use in uses.values() if use.wall > 0) > _MOST_APART:
            return  # ranks also wait for each other in evaluations, which cannot be separated
        busy = _Medians({rank: use.busy for rank, use in uses.items()})
        self.scores = {
            rank: use.busy / typical
            for rank, use in uses.items()
            if (typical := busy.of_others(rank)) > 0 and use.busy > 0
        }
        self._history.append(self.scores)
        for rank, score in self.scores.items():
            self._update_record(rank, score, uses, busy)

    def _update_record(
        self, rank: int, score: float, uses: Mapping[int, Use], busy: "_Medians"
    ) -> None:
        pace, record, use = self._pace, self._records[rank], uses[rank]
        excess = use.busy - busy.of_others(rank)
        is_slow = (
            score >= pace.slow
            and excess >= pace.min_share * use.wall
            and excess > _SIGMAS * busy.spread_of_others(rank)
        )
        record.newest = (*record.newest, score)[-pace.windows :]
        if is_slow:
            if not record.excesses:
                record.since = self._began
            record.excesses = (*record.excesses, _excess(rank, uses))[-pace.windows :]
            record.scores = (*record.scores, score)[-pace.windows :]
            is_long = len(record.scores) == pace.windows
            record.is_named = record.is_named or (is_long and self._exceeds_noise(record.scores))
        elif (
            not record.is_named
            or fmean(record.newest) <= pace.well
            or not self._exceeds_noise(record.newest)
        ):
            self._records[rank] = _Record(newest=record.newest)

    def _exceeds_noise(self, scores: Sequence[float]) -> bool:
        """Whether scores are higher than the ranks' scores vary from window to window.

        If ranks share too few processors, or their rows differ in length, a different rank is slow
        in each window. The score of a constantly slow rank does not vary.
        """
        if len(self._history) < _LEAST_WINDOWS_OF_NOISE:
            return False
        apart = []
        for rank in self._history[-1]:
            values = [log(one[rank]) for one in self._history if rank in one]
            middle = median(values)
            apart += [abs(value - middle) for value in values]
        return fmean(map(log, scores)) > _SIGMAS_OF_NOISE * _MAD_TO_SIGMA * median(apart)

    def _slow(self, rank: int) -> Slow:
        record = self._records[rank]
        causes = {cause: sum(one[cause] for one in record.excesses) for cause in _CAUSES}
        score = sum(record.scores) / len(record.scores)
        return Slow(
            rank=rank,
            cause=max(_CAUSES, key=lambda cause: causes[cause]),
            score=round(score, 2),
            since=record.since,
        )


_CAUSES = (SuspectCause.COMPUTE, SuspectCause.DATA, SuspectCause.CHECKPOINT)


def _excess(rank: int, uses: Mapping[int, Use]) -> dict[SuspectCause, float]:
    """Return by how many seconds per step a rank exceeds the others, by cause."""
    found = {}
    for cause in _CAUSES:
        values = {one: float(getattr(use, cause)) for one, use in uses.items()}
        found[cause] = values[rank] - _Medians(values).of_others(rank)
    return found


def _is_same(first: Seen, last: Seen) -> bool:
    before, after = first.look, last.look
    if before.process_start != after.process_start or last.is_silent:
        return False
    if before.boundary is None or after.boundary is None:
        return False
    return after.boundary.steps >= before.boundary.steps


class _Medians:
    """Medians of all values except one."""

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = values
        self._sorted = sorted(values.values())

    def of_others(self, rank: int) -> float:
        """Return the median of the other ranks' values, of which there must be at least one."""
        ordered, own = self._sorted, bisect_left(self._sorted, self._values[rank])
        num_others = len(ordered) - 1
        middle = {(num_others - 1) // 2, num_others // 2}
        return sum(ordered[at if at < own else at + 1] for at in middle) / len(middle)

    def spread_of_others(self, rank: int) -> float:
        """Return the standard deviation of the others, estimated from their median deviation.

        0 if there are too few others.
        """
        others = [value for one, value in self._values.items() if one != rank]
        if len(others) < _MIN_OTHERS_OF_SPREAD:
            return 0.0
        middle = median(others)
        return _MAD_TO_SIGMA * median(abs(value - middle) for value in others)

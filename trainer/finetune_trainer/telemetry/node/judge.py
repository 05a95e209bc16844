"""Find the ranks that hold the run back, from snapshots of all ranks. Pure.

On rank 0's node, `peers` supplies a snapshot of every rank each second or two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from finetune_trainer.config import MAX_SUSPECTS, Suspect
from finetune_trainer.telemetry.node.slow import Slow, SlowPace, SlowRanks
from finetune_trainer.telemetry.node.snapshots import Seen
from finetune_trainer.telemetry.node.stuck import Stuck, StuckPace, StuckRanks


@dataclass(frozen=True)
class Findings:
    """Result of a round.

    Attributes:
        suspects: Stuck ranks, then slow ranks, worst first.
        scores: Busy time of each rank in the newest window, relative to the others' median.
        num_stalls: Number of times that ranks were named because all had stopped.
    """

    suspects: tuple[Suspect, ...] = ()
    scores: Mapping[int, float] = field(default_factory=dict)
    num_stalls: int = 0


class Judge:
    """Judges the ranks of one attempt; clocks are in seconds since the epoch."""

    def __init__(self, slow: SlowPace, stuck: StuckPace) -> None:
        """Begin without any snapshot."""
        self._slow = SlowRanks(slow)
        self._stuck = StuckRanks(stuck)
        self._num_stalls = 0
        self._is_stalled = False
        self._step_seconds = 0.0
        self._steps: Mapping[int, tuple[int, float]] = {}

    def look(self, now: float, seen: Mapping[int, Seen], *, is_training: bool) -> Findings:
        """Process a snapshot of the ranks and return the current suspects.

        While the run does not train, ranks may wait for rank 0 indefinitely, so there are no
        suspects.
        """
        if not is_training:
            self._slow.forget()
            self._stuck.forget()
            self._is_stalled = False
            return Findings(num_stalls=self._num_stalls)
        stuck = self._stuck.look(now, seen, self._seconds_per_step(seen))
        slow = self._slow.look(now, seen)
        self._num_stalls += bool(stuck) and not self._is_stalled
        self._is_stalled = bool(stuck)
        named = {one.rank for one in stuck}
        suspects = [
            *(_suspect_stuck(one, seen[one.rank].node) for one in stuck),
            *(_suspect_slow(one, seen[one.rank].node) for one in slow if one.rank not in named),
        ]
        return Findings(tuple(suspects[:MAX_SUSPECTS]), dict(self._slow.scores), self._num_stalls)

    def _seconds_per_step(self, seen: Mapping[int, Seen]) -> float:
        """Return the time of a step, measured between the newest snapshots with finished steps."""
        ended = {
            rank: (one.look.boundary.steps, one.look.boundary.at)
            for rank, one in seen.items()
            if one.look.boundary is not None
        }
        times = [
            (at - self._steps[rank][1]) / (steps - self._steps[rank][0])
            for rank, (steps, at) in ended.items()
            if rank in self._steps and steps > self._steps[rank][0]
        ]
        if times:
            self._step_seconds = max(0.0, median(times))
        self._steps = ended
        return self._step_seconds


def _suspect_stuck(one: Stuck, node: str) -> Suspect:
    return Suspect(rank=one.rank, node=node, cause=one.cause, since=one.since, process=one.process)


def _suspect_slow(one: Slow, node: str) -> Suspect:
    return Suspect(rank=one.rank, node=node, cause=one.cause, score=one.score, since=one.since)

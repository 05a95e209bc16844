"""Who holds the run back: from looks at all ranks to suspects. Pure.

`peers` gives it a look at every rank each second or two, on rank 0's node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from finetune_trainer.config import MAX_SUSPECTS, Suspect
from finetune_trainer.telemetry.node.looks import Seen
from finetune_trainer.telemetry.node.slow import Slow, SlowPace, SlowRanks
from finetune_trainer.telemetry.node.stuck import Stuck, StuckPace, StuckRanks


@dataclass(frozen=True)
class Findings:
    """What came of a look.

    Attributes:
        suspects: who stays away, then who is slow, worst first.
        scores: busy time by the median of the others', of each rank in the newest window.
        num_stalls: how often nobody got on for so long that somebody was named for it.
    """

    suspects: tuple[Suspect, ...] = ()
    scores: Mapping[int, float] = field(default_factory=dict)
    num_stalls: int = 0


class Judge:
    """Follows one attempt; clocks are in seconds since the epoch."""

    def __init__(self, slow: SlowPace, stuck: StuckPace) -> None:
        """Begin with no look at all."""
        self._slow = SlowRanks(slow)
        self._stuck = StuckRanks(stuck)
        self._num_stalls = 0
        self._is_stalled = False
        self._step_seconds = 0.0
        self._steps: Mapping[int, tuple[int, float]] = {}

    def look(self, now: float, seen: Mapping[int, Seen], *, is_training: bool) -> Findings:
        """Take a look at the ranks into account, and return who is a suspect now.

        While the run does not train, ranks may wait for rank 0 as long as it needs, so there are
        none.
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
        """Return the time of a step, as it was between the newest looks that saw some end."""
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

"""Find the ranks that are missing from a collective in which the others wait. Pure.

Ranks begin the same collectives in the same order, so the number of begun collectives measures a
rank's progress. If no rank progresses and some have begun fewer collectives, the others wait for
these ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.config import SuspectCause
from finetune_trainer.telemetry.node.snapshots import RankSnapshot, Seen
from finetune_trainer.telemetry.processes import PROCESS_STATES

STOPPED = frozenset({"T", "t", None})
"""States of processes that cannot take part in a collective."""
_CAUSES = {
    "data_wait": SuspectCause.DATA,
    "checkpoint_blocking": SuspectCause.CHECKPOINT,
}
_MAY_TAKE_LONG = frozenset({"checkpoint_blocking", "eval", "profiling"})


@dataclass(frozen=True)
class StuckPace:
    """How long ranks may wait for a rank before it is named.

    Attributes:
        seconds: Minimum time.
        steps: Minimum number of steps' durations, if that is longer.
        long_seconds: Minimum if the rank saves, evaluates, starts or stops a profiler, or has not
            finished its first step, in which kernels may be compiled.
        most_seconds: Maximum time, after which the run is ended; None for no limit.
    """

    seconds: float = 30.0
    steps: float = 10.0
    long_seconds: float = 300.0
    most_seconds: float | None = None


@dataclass(frozen=True)
class Stuck:
    """A rank that does not come to a collective.

    Attributes:
        process: State of its process, in words.
        since: Last progress of any rank, on the clock of the snapshots.
    """

    rank: int
    cause: SuspectCause
    process: str
    since: float


class StuckRanks:
    """Follows the progress of the ranks."""

    def __init__(self, pace: StuckPace) -> None:
        self._pace = pace
        self._looks: Mapping[int, RankSnapshot] = {}
        self._quiet_since = 0.0

    def look(self, now: float, seen: Mapping[int, Seen], step_seconds: float) -> list[Stuck]:
        """Process a snapshot; return the ranks that the others wait for, by rank.

        `step_seconds` is the duration of a step, 0 if not known.
        """
        before, self._looks = self._looks, {rank: one.look for rank, one in seen.items()}
        if before.keys() != seen.keys() or any(
            _has_progressed(before[rank], look) for rank, look in self._looks.items()
        ):
            self._quiet_since = now
            return []
        found = awaited_ranks(seen)
        if not found or now - self._quiet_since < self._patience(found, step_seconds):
            return []
        return [self._stuck(one) for one in sorted(found, key=lambda one: one.look.rank)]

    def forget(self) -> None:
        """Start over, because the run has stopped training."""
        self._looks = {}

    def _patience(self, found: list[Seen], step_seconds: float) -> float:
        pace = self._pace
        patience = max(pace.seconds, pace.steps * step_seconds)
        if any(one.look.boundary is None or one.look.phase in _MAY_TAKE_LONG for one in found):
            patience = max(patience, pace.long_seconds)
        return patience if pace.most_seconds is None else min(patience, pace.most_seconds)

    def _stuck(self, one: Seen) -> Stuck:
        look = one.look
        cause = _CAUSES.get(look.phase or "", SuspectCause.STUCK)
        process = "gone" if look.process is None else PROCESS_STATES.get(look.process, look.process)
        if one.is_silent:
            process = "not known, because its node is silent"
        is_unable = one.is_silent or look.process in STOPPED
        return Stuck(
            rank=look.rank,
            cause=SuspectCause.STUCK if is_unable else cause,
            process=process,
            since=self._quiet_since,
        )


def awaited_ranks(seen: Mapping[int, Seen]) -> list[Seen]:
    """Return the ranks that the others wait for; empty if no difference is known.

    NCCL's collectives are counted once per step, so torch's recorder may know more than the ranks
    have published. If all ranks have begun the same number, these are the ranks that cannot take
    part: stopped, gone, or on a silent node.
    """
    for counted in ("position", "recorded"):
        known = [one for one in seen.values() if getattr(one.look, counted) is not None]
        counts = {getattr(one.look, counted) for one in known}
        if len(counts) > 1:
            return [one for one in known if getattr(one.look, counted) == min(counts)]
    unable = [one for one in seen.values() if one.is_silent or one.look.process in STOPPED]
    return unable if len(unable) < len(seen) else []


def _has_progressed(before: RankSnapshot, after: RankSnapshot) -> bool:
    """Whether a rank made progress between two snapshots; a first recorder query is no progress."""
    if after.recorded is not None and before.recorded not in (None, after.recorded):
        return True
    return _position_of(before) != _position_of(after)


def _position_of(look: RankSnapshot) -> tuple[object, ...]:
    steps = look.boundary.steps if look.boundary is not None else 0
    return look.process_start, look.position, steps

"""Which rank did not come to a collective in which the others wait. Pure.

Ranks begin the same collectives in the same order, so how many a rank has begun says how far it
is. Where nobody gets on, and some have begun more than others, those behind are waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.config import SuspectCause
from finetune_trainer.telemetry.node.looks import RankLook, Seen
from finetune_trainer.telemetry.processes import PROCESS_STATES

_STOPPED = frozenset({"T", "t", None})  # also who has begun as many as the others, and is so
_CAUSES = {
    "data_wait": SuspectCause.DATA,
    "checkpoint_blocking": SuspectCause.CHECKPOINT,
}
_MAY_TAKE_LONG = frozenset({"checkpoint_blocking", "eval"})


@dataclass(frozen=True)
class StuckPace:
    """How long ranks may wait for one before it is named.

    Attributes:
        seconds: at least.
        steps: or as long as so many steps take, if that is more.
        long_seconds: where it saves, evaluates, or has not made its first step, as kernels may be
            compiled in that.
        most_seconds: never longer than this, as somebody ends the run then; None for no end.
    """

    seconds: float = 30.0
    steps: float = 10.0
    long_seconds: float = 300.0
    most_seconds: float | None = None


@dataclass(frozen=True)
class Stuck:
    """A rank that stays away.

    Attributes:
        process: state of its process, in words.
        since: when it or any other rank last got on, on the clock of the looks.
    """

    rank: int
    cause: SuspectCause
    process: str
    since: float


class StuckRanks:
    """Follows how far the ranks are."""

    def __init__(self, pace: StuckPace) -> None:
        self._pace = pace
        self._progress: Mapping[int, tuple[object, ...]] = {}
        self._quiet_since = 0.0

    def look(self, now: float, seen: Mapping[int, Seen], step_seconds: float) -> list[Stuck]:
        """Take a look into account; return who is waited for, by rank.

        `step_seconds` is how long a step takes, 0 where that is not known.
        """
        progress = {rank: _progress(one.look) for rank, one in seen.items()}
        if progress != self._progress:
            self._progress, self._quiet_since = progress, now
            return []
        found = behind(seen)
        if not found or now - self._quiet_since < self._patience(found, step_seconds):
            return []
        return [self._stuck(one) for one in sorted(found, key=lambda one: one.look.rank)]

    def forget(self) -> None:
        """Begin anew, as the run does something else now."""
        self._progress = {}

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
            process = "not known, as its node is silent"
        is_unable = one.is_silent or look.process in _STOPPED
        return Stuck(
            rank=look.rank,
            cause=SuspectCause.STUCK if is_unable else cause,
            process=process,
            since=self._quiet_since,
        )


def behind(seen: Mapping[int, Seen]) -> list[Seen]:
    """Return the ranks that the others are waiting for; none where no such difference is known.

    Where all have begun as many collectives, these are the ranks that cannot take part: stopped,
    gone, or of a node that nobody hears of.
    """
    known = [one for one in seen.values() if one.look.position is not None]
    positions = {one.look.position for one in known}
    if len(positions) > 1:
        lowest = min(position for position in positions if position is not None)
        return [one for one in known if one.look.position == lowest]
    unable = [one for one in seen.values() if one.is_silent or one.look.process in _STOPPED]
    return unable if len(unable) < len(seen) else []


def _progress(look: RankLook) -> tuple[object, ...]:
    steps = look.boundary.steps if look.boundary is not None else 0
    return look.process_start, look.position, steps

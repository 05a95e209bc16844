"""Which rank did not come to a collective in which the others wait. Pure.

Ranks begin the same collectives in the same order, so how many a rank has begun says how far it
is. Where nobody gets on, and some have begun more than others, those behind are waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.config import SuspectCause
from finetune_trainer.telemetry.node.looks import RankLook, Seen
from finetune_trainer.telemetry.processes import PROCESS_STATES

STOPPED = frozenset({"T", "t", None})
"""States of processes that can take part in nothing."""
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
        self._looks: Mapping[int, RankLook] = {}
        self._quiet_since = 0.0

    def look(self, now: float, seen: Mapping[int, Seen], step_seconds: float) -> list[Stuck]:
        """Take a look into account; return who is waited for, by rank.

        `step_seconds` is how long a step takes, 0 where that is not known.
        """
        before, self._looks = self._looks, {rank: one.look for rank, one in seen.items()}
        if before.keys() != seen.keys() or any(
            _gets_on(before[rank], look) for rank, look in self._looks.items()
        ):
            self._quiet_since = now
            return []
        found = behind(seen)
        if not found or now - self._quiet_since < self._patience(found, step_seconds):
            return []
        return [self._stuck(one) for one in sorted(found, key=lambda one: one.look.rank)]

    def forget(self) -> None:
        """Begin anew, as the run does something else now."""
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
            process = "not known, as its node is silent"
        is_unable = one.is_silent or look.process in STOPPED
        return Stuck(
            rank=look.rank,
            cause=SuspectCause.STUCK if is_unable else cause,
            process=process,
            since=self._quiet_since,
        )


def behind(seen: Mapping[int, Seen]) -> list[Seen]:
    """Return the ranks that the others are waiting for; none where no such difference is known.

    NCCL's are noted once a step, so torch's recorder may know more than the ranks have noted. Where
    all have begun as many collectives, these are the ranks that cannot take part: stopped,
    gone, or of a node that nobody hears of.
    """
    for counted in ("position", "recorded"):
        known = [one for one in seen.values() if getattr(one.look, counted) is not None]
        counts = {getattr(one.look, counted) for one in known}
        if len(counts) > 1:
            return [one for one in known if getattr(one.look, counted) == min(counts)]
    unable = [one for one in seen.values() if one.is_silent or one.look.process in STOPPED]
    return unable if len(unable) < len(seen) else []


def _gets_on(before: RankLook, after: RankLook) -> bool:
    """Say whether a rank has got on between two looks; that it was asked for more is nothing."""
    if after.recorded is not None and before.recorded not in (None, after.recorded):
        return True
    return _noted(before) != _noted(after)


def _noted(look: RankLook) -> tuple[object, ...]:
    steps = look.boundary.steps if look.boundary is not None else 0
    return look.process_start, look.position, steps

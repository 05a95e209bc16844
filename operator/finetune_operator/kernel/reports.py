"""When a new status is written: at once, unless it can wait for what somebody is to do about it.

The write budget leaves two patches until a job is Running: one when all of its nodes run, one when
it trains. That the first attempt was opened waits for the first of them, some seconds; words that
change often are written seldom; and what reports a start in which nothing is in the way waits until
no other job is to be looked at. Nothing waits without a bound.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1.status import FineTuneJobStatus, JobPhase
from finetune_operator.kernel.writes import PASSING, facts
from finetune_operator.kube.cache import Key
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import (
    ConditionType,
    find,
    is_true,
    parse_rfc3339,
    rfc3339,
)

_OPENING_SECONDS = 3.0
_NODES_SECONDS = 10.0
# As long as a burst of some hundred jobs takes, so that its reports come after its openings.
_QUIET_SECONDS = 20.0
_WORDS_SECONDS = 15.0
_REASONS_KEPT = 4
_Reasons = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Delay:
    """How long a new status may wait.

    Attributes:
        seconds: At most; 0 for a status that is to be written now.
        until_quiet: It may be written as soon as no other job is to be looked at.
    """

    seconds: float = 0.0
    until_quiet: bool = False

    def __bool__(self) -> bool:
        """Say whether it may wait at all."""
        return self.seconds > 0


NO_DELAY = Delay()


class Reports:
    """What was told about each job by this process and when, and what waits to be told."""

    def __init__(self) -> None:
        self._told: dict[Key, dict[_Reasons, datetime]] = {}
        self._held: dict[Key, datetime] = {}  # since when a report waits until it is quiet

    def delay(
        self,
        key: Key,
        saved: FineTuneJobStatus,
        new: FineTuneJobStatus,
        now: datetime,
        *,
        created: datetime,
        with_handle: bool,
        is_busy: bool,
    ) -> Delay:
        """Return how long `new` need not be written yet.

        Args:
            key: The job's.
            saved: What the API server has.
            new: What was decided, and is worth a write.
            now: Time with a zone.
            created: When the job was.
            with_handle: Whether the attempt cannot be found again by its name alone, so that it
                is told of at once.
            is_busy: Whether other jobs are to be looked at.
        """
        if left := self._words_left(key, saved, new, now):
            return Delay(left)
        if with_handle or not _is_smooth_start(saved, new):
            return NO_DELAY
        if not saved.attempt and (left := _opening_left(new, now, created)):
            return Delay(left)
        if not is_busy:
            return NO_DELAY
        until = self._held.setdefault(key, now) + timedelta(seconds=_QUIET_SECONDS)
        return Delay(max(0.0, (until - now).total_seconds()), until_quiet=True)

    def note(self, key: Key, written: FineTuneJobStatus, now: datetime) -> None:
        """Remember that it was written; of what was told longest ago something is forgotten."""
        self._held.pop(key, None)
        told = self._told.setdefault(key, {})
        told.pop(_reasons(written), None)
        told[_reasons(written)] = now
        for reasons in list(told)[:-_REASONS_KEPT]:
            del told[reasons]

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is over."""
        self._told.pop(key, None)
        self._held.pop(key, None)

    def _words_left(
        self, key: Key, saved: FineTuneJobStatus, new: FineTuneJobStatus, now: datetime
    ) -> float:
        """Return how long `new` may wait as it only words anew what was told a moment ago.

        A scheduler words anew what it lacks with each node that joins, and of two stuck pods now
        this one is heard, now that one.
        """
        told = self._told.get(key, {}).get(_reasons(new))
        if told is None or _has_no_obstacle(new):
            return 0.0
        if facts(saved, with_handle=True) != facts(new, with_handle=True):
            return 0.0
        return max(0.0, _WORDS_SECONDS - (now - told).total_seconds())


def _is_smooth_start(saved: FineTuneJobStatus, new: FineTuneJobStatus) -> bool:
    """Say whether `new` only tells how the first attempt starts, with nothing in its way."""
    opened = attempts.current(new)
    if opened is None or opened.number > 1:
        return False
    if is_true(saved, ConditionType.STALLED) or is_true(new, ConditionType.STALLED):
        return False
    if new.phase is not JobPhase.STARTING or not _has_no_obstacle(new):
        return False
    if not saved.attempt:
        return find(saved, ConditionType.ACCEPTED) is None
    return saved.phase is JobPhase.STARTING and _has_no_obstacle(saved)


def _has_no_obstacle(status: FineTuneJobStatus) -> bool:
    ready = find(status, ConditionType.RESOURCES_READY)
    return ready is not None and ready.reason in PASSING


def _opening_left(status: FineTuneJobStatus, now: datetime, created: datetime) -> float:
    """Return how long a status may wait that only opens the first attempt.

    Nodes that are there at all run within seconds, and then both is told at once. Whoever reads the
    resource meanwhile sees the status that the CRD gives a new job. An operator that dies before it
    has written finds the attempt by its name.
    """
    opened_at = parse_rfc3339(status.attempts[-1].start_time or rfc3339(now))
    until = opened_at + timedelta(seconds=_OPENING_SECONDS)
    if not is_true(status, ConditionType.RESOURCES_READY):
        # Not of when it was opened: after an outage that may be late.
        until = max(until, created + timedelta(seconds=_NODES_SECONDS))
    return max(0.0, (until - now).total_seconds())


def _reasons(status: FineTuneJobStatus) -> _Reasons:
    return tuple((one.type, one.reason) for one in status.conditions)

"""What of a new status is worth a write, and the patch that writes it.

A job that starts says much that nobody waits for; the write budget leaves two patches until it is
Running: one when all of its nodes run, one when it trains. So what only passes by (the handle that
can be found again, progress before the first step) is written with the next change that matters.
That the first attempt was opened passes by for some seconds too, and for some more while other jobs
wait to be opened: of many that are applied at once all are created before the first is written
about.
"""

from datetime import datetime, timedelta
from typing import Any

from finetune_operator.api.v1alpha1.status import Condition, FineTuneJobStatus, JobPhase
from finetune_operator.kube.cache import Key
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    find,
    is_true,
    parse_rfc3339,
)

_PASSING = frozenset({Reason.PROVISIONING, Reason.STARTING})
_OPENING_SECONDS = 3.0
_NODES_SECONDS = 10.0
_BUSY_OPENING_SECONDS = 10.0
_STILL_BUSY_SECONDS = 1.0
_WORDS_SECONDS = 15.0
_REASONS_KEPT = 4
_Reasons = tuple[tuple[str, str], ...]
_APART = frozenset({"attempts", "backend_ref", "conditions", "nodes", "progress"})


def is_worth_writing(
    saved: FineTuneJobStatus, new: FineTuneJobStatus, *, with_handle: bool
) -> bool:
    """Say whether `new` tells more than `saved` that should be seen now.

    Args:
        saved: What the API server has.
        new: What was decided.
        with_handle: Whether the handle counts, as it cannot be found again by its name alone.
    """
    return _essence(saved, with_handle) != _essence(new, with_handle)


def _essence(status: FineTuneJobStatus, with_handle: bool) -> tuple[object, ...]:
    return (*_facts(status, with_handle), *(_gist(one) for one in status.conditions))


def _facts(status: FineTuneJobStatus, with_handle: bool) -> tuple[object, ...]:
    """Return what a status tells without a word: reasons and sentences are left out."""
    starts = status.phase in (JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RESTARTING)
    return (
        {name: value for name, value in status if name not in _APART},
        [{**dict(one), "digest": None} for one in status.attempts],
        {name: value for name, value in status.nodes if name != "ready"},
        None if starts else status.progress,
        status.backend_ref if with_handle else None,
        *((one.type, one.status, one.observed_generation) for one in status.conditions),
    )


def _gist(condition: Condition) -> tuple[object, ...]:
    reason, message = condition.reason, condition.message
    if reason in _PASSING:
        reason = message = ""
    return (reason, message)


def opening_left(
    saved: FineTuneJobStatus,
    new: FineTuneJobStatus,
    now: datetime,
    *,
    created: datetime,
    is_busy: bool,
) -> float:
    """Return how many seconds `new` need not be written yet, as it only opens the first attempt.

    Nodes that are there at all run within seconds, and then both is told at once. Whoever reads the
    resource meanwhile sees the status that the CRD gives a new job. An operator that dies before it
    has written finds the attempt by its name.

    Args:
        saved: What the API server has.
        new: What was decided.
        now: Time with a zone.
        created: When the job was.
        is_busy: Whether other jobs wait to be opened, which comes first; ask again when the
            seconds are over.
    """
    opened, ready = attempts.current(new), find(new, ConditionType.RESOURCES_READY)
    is_untold = not saved.attempt and find(saved, ConditionType.ACCEPTED) is None
    if not is_untold or opened is None or opened.start_time is None:
        return 0.0
    if new.phase is not JobPhase.STARTING or is_true(new, ConditionType.STALLED):
        return 0.0
    if ready is None or ready.reason not in _PASSING:
        return 0.0
    opened_at = parse_rfc3339(opened.start_time)
    until = opened_at + timedelta(seconds=_OPENING_SECONDS)
    if ready.reason != Reason.STARTING:
        # Not of when it was opened: after an outage that may be late.
        until = max(until, created + timedelta(seconds=_NODES_SECONDS))
    if until <= now and is_busy:
        until = opened_at + timedelta(seconds=_BUSY_OPENING_SECONDS)
        until = min(until, now + timedelta(seconds=_STILL_BUSY_SECONDS))
    return max(0.0, (until - now).total_seconds())


class WordsTold:
    """When this process told which reasons, so that sentences that change often are written seldom.

    A scheduler words anew what it lacks with each node that joins, and of two stuck pods now this
    one is heard, now that one. A reason is written at once unless it was told a moment ago.
    """

    def __init__(self) -> None:
        self._told: dict[Key, dict[_Reasons, datetime]] = {}

    def left(
        self, key: Key, saved: FineTuneJobStatus, new: FineTuneJobStatus, now: datetime
    ) -> float:
        """Return how many seconds `new` need not be written yet, as it only words things anew."""
        told = self._told.get(key, {}).get(_reasons(new))
        if told is None or not is_worth_writing(saved, new, with_handle=True):
            return 0.0
        ready = find(new, ConditionType.RESOURCES_READY)
        has_no_obstacle = ready is not None and ready.reason in _PASSING
        if has_no_obstacle or _facts(saved, with_handle=True) != _facts(new, with_handle=True):
            return 0.0
        return max(0.0, _WORDS_SECONDS - (now - told).total_seconds())

    def note(self, key: Key, written: FineTuneJobStatus, now: datetime) -> None:
        """Remember that it was written; of what was told longest ago something is forgotten."""
        told = self._told.setdefault(key, {})
        told.pop(_reasons(written), None)
        told[_reasons(written)] = now
        for reasons in list(told)[:-_REASONS_KEPT]:
            del told[reasons]

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is over."""
        self._told.pop(key, None)


def _reasons(status: FineTuneJobStatus) -> _Reasons:
    return tuple((one.type, one.reason) for one in status.conditions)


def status_patch(old: FineTuneJobStatus, new: FineTuneJobStatus) -> dict[str, Any]:
    """Return the JSON merge patch that turns one status into another."""
    before, after = (
        one.model_dump(by_alias=True, exclude_none=True, mode="json") for one in (old, new)
    )
    return merge_patch(before, after)


def merge_patch(old: Any, new: Any) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7396) that turns one object into another."""
    made: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := merge_patch(before, value):
                made[key] = inner
        elif value != before or key not in old:
            made[key] = value
    return made

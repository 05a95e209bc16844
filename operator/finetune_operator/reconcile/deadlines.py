"""`spec.deadlines`: which limit a job has passed, and when the next one is due."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.lifecycle import Deadlines
from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.reconcile.attempts import active_since, current
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    find,
    is_true,
    parse_rfc3339,
)

_DEADLINES = (Reason.PENDING_DEADLINE_EXCEEDED, Reason.ACTIVE_DEADLINE_EXCEEDED)


@dataclass(frozen=True)
class Deadline:
    """One limit of a job.

    Attributes:
        at: When it passes.
        reason: What the job fails with then.
        message: The sentence that goes with it.
        obstacle: What was in the way until then, if that was told.
    """

    at: datetime
    reason: Reason
    message: str
    obstacle: str = ""


def active(limits: Deadlines, status: FineTuneJobStatus) -> Deadline | None:
    """Return the end of the job's life, over all attempts; suspension starts a new life."""
    since = active_since(status)
    if limits.active_seconds is None or since is None:
        return None
    message = f"the job was active for deadlines.activeSeconds {limits.active_seconds}"
    at = since + timedelta(seconds=limits.active_seconds)
    return Deadline(at, Reason.ACTIVE_DEADLINE_EXCEEDED, message)


def of_attempt(
    limits: Deadlines, status: FineTuneJobStatus, observation: Observation, now: datetime
) -> list[Deadline]:
    """Return the deadlines that an open attempt has to keep."""
    both = (active(limits, status), pending(limits, status, observation, now))
    return [one for one in both if one is not None]


def before_creation(
    spec: FineTuneJobSpec, status: FineTuneJobStatus, now: datetime
) -> Deadline | None:
    """Return the deadline that passed before the open attempt was created, with what is in the way.

    None where none has, or nothing was told to be in the way: no deadline of a suspended job runs.
    """
    told = find(status, ConditionType.RESOURCES_READY)
    if told is None or told.reason != Reason.CREATION_FAILED:
        return None
    if spec.suspend or is_true(status, ConditionType.SUSPENDED):
        return None
    limits = of_attempt(spec.deadlines, status, Observation(AttemptPhase.PENDING), now)
    passed = next((limit for limit in limits if limit.at <= now), None)
    return passed and replace(passed, obstacle=told.message)


def pending(
    limits: Deadlines, status: FineTuneJobStatus, observation: Observation, now: datetime
) -> Deadline | None:
    """Return the end of the open attempt's wait for resources; None where it does not wait for any.

    Time in a queue does not count: nobody looks for nodes before the queue lets the attempt go.
    """
    attempt = current(status)
    if limits.pending_seconds is None or attempt is None or attempt.start_time is None:
        return None
    if observation.phase is AttemptPhase.UNKNOWN:
        waits = is_waiting(status)
    else:
        waits = observation.phase is AttemptPhase.PENDING
    if not waits or observation.reason == Reason.QUEUED:
        return None
    since = _waits_since(status, parse_rfc3339(attempt.start_time), now)
    message = f"no resources within deadlines.pendingSeconds {limits.pending_seconds}"
    at = since + timedelta(seconds=limits.pending_seconds)
    return Deadline(at, Reason.PENDING_DEADLINE_EXCEEDED, message)


def _waits_since(status: FineTuneJobStatus, opened: datetime, now: datetime) -> datetime:
    """Return when the queue let the attempt go, which is now if it was in its queue till now."""
    admitted = find(status, ConditionType.ADMITTED)
    if admitted is None or admitted.last_transition_time is None:
        return opened
    if admitted.reason == Reason.QUEUED:
        return now
    let_go = parse_rfc3339(admitted.last_transition_time)
    return max(opened, let_go) if admitted.status == "True" else opened


def is_waiting(status: FineTuneJobStatus) -> bool:
    """Say whether the open attempt had not all of its resources when it was seen last."""
    found = find(status, ConditionType.RESOURCES_READY)
    return found is not None and found.status == "False" and found.reason != Reason.RESTARTING


def ending(status: FineTuneJobStatus) -> tuple[Reason, str] | None:
    """Return the deadline for which the job is already being stopped, or None.

    It is kept in the condition `Failed` (still False), as the attempt that is stopped for it looks
    like any other on a later look.
    """
    found = find(status, ConditionType.FAILED)
    if found is None or found.reason not in _DEADLINES:
        return None
    return Reason(found.reason), found.message

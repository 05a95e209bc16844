"""`spec.deadlines`: which limit a job has passed, and when the next one is due."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1.lifecycle import Deadlines
from finetune_operator.api.v1alpha1.status import AttemptStatus, FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.reconcile.attempts import active_since
from finetune_operator.reconcile.conditions import ConditionType, Reason, find, parse_rfc3339

_DEADLINES = (Reason.PENDING_DEADLINE_EXCEEDED, Reason.ACTIVE_DEADLINE_EXCEEDED)


@dataclass(frozen=True)
class Deadline:
    """One limit of a job.

    Attributes:
        at: When it passes.
        reason: What the job fails with then.
        message: The sentence that goes with it.
    """

    at: datetime
    reason: Reason
    message: str


def active(limits: Deadlines, status: FineTuneJobStatus) -> Deadline | None:
    """Return the end of the job's life, over all attempts; suspension starts a new life."""
    since = active_since(status)
    if limits.active_seconds is None or since is None:
        return None
    message = f"the job was active for deadlines.activeSeconds {limits.active_seconds}"
    at = since + timedelta(seconds=limits.active_seconds)
    return Deadline(at, Reason.ACTIVE_DEADLINE_EXCEEDED, message)


def pending(limits: Deadlines, attempt: AttemptStatus, observation: Observation) -> Deadline | None:
    """Return the end of an attempt's wait for resources; None once it has them."""
    waits = observation.phase in (AttemptPhase.PENDING, AttemptPhase.UNKNOWN)
    if limits.pending_seconds is None or attempt.start_time is None or not waits:
        return None
    message = f"no resources within deadlines.pendingSeconds {limits.pending_seconds}"
    at = parse_rfc3339(attempt.start_time) + timedelta(seconds=limits.pending_seconds)
    return Deadline(at, Reason.PENDING_DEADLINE_EXCEEDED, message)


def ending(status: FineTuneJobStatus) -> tuple[Reason, str] | None:
    """Return the deadline for which the job is already being stopped, or None.

    It is kept in the condition `Failed` (still False), as the attempt that is stopped for it looks
    like any other on a later look.
    """
    found = find(status, ConditionType.FAILED)
    if found is None or found.reason not in _DEADLINES:
        return None
    return Reason(found.reason), found.message

"""What a job's time goes into, as its status and the phase of rank 0 say it. Pure."""

from enum import StrEnum

from finetune_operator.api.v1alpha1.status import FineTuneJobStatus, JobPhase
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    find,
    is_true,
    parse_rfc3339,
)


class Category(StrEnum):
    """What a moment of a job belongs to; each to exactly one."""

    QUEUED = "queued"
    PROVISIONING = "provisioning"
    STARTING = "starting"
    PRODUCTIVE = "productive"
    RECOMPUTED = "recomputed"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    EXPORTING = "exporting"
    RESTARTING = "restarting"
    SUSPENDED = "suspended"
    OTHER = "other"


def category_of(status: FineTuneJobStatus) -> Category | None:
    """Return what the time of an unfinished job goes into by its status.

    None where rank 0 knows more: its attempt trains, or is being stopped after it did.
    """
    if attempts.current(status) is None:
        return _between_attempts(status)
    if is_true(status, ConditionType.SUSPENDED):
        return Category.SUSPENDED  # it was resumed, and cannot go on yet
    if status.phase is JobPhase.QUEUED:
        return Category.QUEUED
    if is_true(status, ConditionType.RUNNING):
        return None
    if is_recovering(status):
        return Category.RESTARTING
    if is_true(status, ConditionType.RESOURCES_READY):
        return Category.STARTING
    if status.phase in (JobPhase.SUSPENDING, JobPhase.DELETING):
        return Category.OTHER
    return Category.PROVISIONING


def _between_attempts(status: FineTuneJobStatus) -> Category:
    if is_true(status, ConditionType.SUSPENDED):
        return Category.SUSPENDED
    if status.phase is JobPhase.DELETING or is_true(status, ConditionType.STALLED):
        return Category.OTHER  # nothing is done before somebody fixes something
    return Category.RESTARTING if status.attempt else Category.QUEUED


def is_recovering(status: FineTuneJobStatus) -> bool:
    """Say whether the newest attempt has failed, or follows one that has."""
    return has_failed(status) or (status.attempt > 1 and not follows_suspension(status))


def has_failed(status: FineTuneJobStatus) -> bool:
    """Say whether the open attempt has failed, though something of it lives."""
    ready = find(status, ConditionType.RESOURCES_READY)
    return ready is not None and ready.reason == Reason.RESTARTING


def follows_suspension(status: FineTuneJobStatus) -> bool:
    """Say whether the newest attempt was opened because the job was resumed."""
    resumed = find(status, ConditionType.SUSPENDED)
    if resumed is None or resumed.reason != Reason.RESUMED or len(status.attempts) < 2:
        return False
    ended, since = status.attempts[-2].end_time, resumed.last_transition_time
    return not ended or not since or parse_rfc3339(since) >= parse_rfc3339(ended)

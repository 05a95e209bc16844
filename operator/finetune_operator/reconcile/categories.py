"""Categories of a job's time, by its status and the phase of rank 0. Pure."""

from enum import StrEnum

from finetune_operator.api.v1alpha1.status import FineTuneJobStatus, JobPhase
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    find,
    is_true,
    is_unheard,
    parse_rfc3339,
)


class Category(StrEnum):
    """Category of time; each moment of a job belongs to exactly one."""

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
    """Return the category of an unfinished job by its status.

    Returns:
        The category. None if the report of rank 0 decides, because the attempt trains or is being
        stopped after training.
    """
    if attempts.current(status) is None:
        return _between_attempts(status)
    if is_true(status, ConditionType.SUSPENDED):
        return Category.SUSPENDED  # the job was resumed, but its next attempt cannot start yet
    if status.phase is JobPhase.QUEUED:
        return Category.QUEUED
    if is_true(status, ConditionType.RUNNING):
        return None
    if is_unheard(status):  # the next report includes the time without reports
        return Category.OTHER if status.attempts[-1].last_step is None else None
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
        return Category.OTHER  # the job waits for a fix by a user
    return Category.RESTARTING if status.attempt else Category.QUEUED


def is_recovering(status: FineTuneJobStatus) -> bool:
    """Whether the newest attempt has failed, or follows a failed attempt."""
    return has_failed(status) or (status.attempt > 1 and not follows_suspension(status))


def has_failed(status: FineTuneJobStatus) -> bool:
    """Whether the open attempt has failed, although some of its processes still run."""
    ready = find(status, ConditionType.RESOURCES_READY)
    return ready is not None and ready.reason == Reason.RESTARTING


def follows_suspension(status: FineTuneJobStatus) -> bool:
    """Whether the newest attempt was opened because the job was resumed."""
    resumed = find(status, ConditionType.SUSPENDED)
    if resumed is None or resumed.reason != Reason.RESUMED or len(status.attempts) < 2:
        return False
    ended, since = status.attempts[-2].end_time, resumed.last_transition_time
    return not ended or not since or parse_rfc3339(since) >= parse_rfc3339(ended)

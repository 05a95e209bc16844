"""What is told of an open attempt that is not created, and when its job fails for that.

Called by the operator's kernel, which tries again meanwhile; pure, as `decide` is.
"""

from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.reconcile import attempts, deadlines, failures
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    Situation,
    Stage,
    describe,
    find,
    is_finished,
    is_true,
    parse_rfc3339,
    rfc3339,
)

PATIENCE_SECONDS = 5.0
"""What may pass by itself is not told before it has lasted so long."""


def block(job: FineTuneJob, message: str, now: datetime) -> FineTuneJobStatus:
    """Return the status of a job whose open attempt cannot be created until somebody mends a cause.

    For a quota, a missing right, an object of somebody else in the way. The attempt stays open.
    """
    situation = Situation(Stage.BLOCKED, Reason.CREATION_FAILED, message)
    return _described(job, job.status, situation, now)


def delay(
    job: FineTuneJob, message: str, now: datetime, *, is_stuck: bool = False
) -> FineTuneJobStatus | None:
    """Return the status of a job whose open attempt is long in coming; None where it is not yet.

    For what may pass by itself: an API server or a webhook that does not answer, pods that have not
    gone yet. With `is_stuck` for what does not, which is told at once, as `block` does.
    """
    attempt, suspend = attempts.current(job.status), job.spec.suspend
    is_suspended = is_true(job.status, ConditionType.SUSPENDED)
    if attempt is None or attempt.start_time is None or (suspend and is_suspended):
        return None
    is_early = now - parse_rfc3339(attempt.start_time) < timedelta(seconds=PATIENCE_SECONDS)
    if is_finished(job.status) or (is_early and not is_stuck):
        return None
    if is_suspended:
        text = f"resumed, but attempt {attempt.number} cannot go on yet: {message}"
        situation = Situation(Stage.SUSPENDED, Reason.SUSPENDED_BY_USER, text)
    elif suspend:
        text = f"waiting until nothing of attempt {attempt.number} can run: {message}"
        situation = Situation(Stage.SUSPENDING, Reason.SUSPENDING, text)
    elif is_stuck:
        return block(job, message, now)
    else:
        stage = Stage.STARTING if attempt.number == 1 else Stage.RESTARTING
        situation = Situation(stage, Reason.CREATION_FAILED, message)
    return _described(job, job.status, situation, now)


def give_up(job: FineTuneJob, now: datetime) -> FineTuneJobStatus | None:
    """Return the status of a job that fails, as a deadline passed before its attempt was created.

    None where none has passed, or nothing was told to be in the way: no deadline of a suspended job
    runs. The caller must have made sure that nothing of the attempt exists.
    """
    if job.spec.suspend or is_finished(job.status) or is_true(job.status, ConditionType.SUSPENDED):
        return None
    status, attempt = job.status, attempts.current(job.status)
    told = find(status, ConditionType.RESOURCES_READY)
    if attempt is None or told is None or told.reason != Reason.CREATION_FAILED:
        return None
    waits = Observation(AttemptPhase.PENDING, message=told.message)
    limits = (
        deadlines.active(job.spec.deadlines, status),
        deadlines.pending(job.spec.deadlines, status, waits, now),
    )
    passed = next((limit for limit in limits if limit and limit.at <= now), None)
    if passed is None:
        return None
    status = attempts.close(status, failures.verdict(waits), "", now)
    status = status.model_copy(update={"completion_time": rfc3339(now)})
    text = f"{passed.message}: {told.message}"
    return _described(job, status, Situation(Stage.FAILED, passed.reason, text), now)


def _described(
    job: FineTuneJob, status: FineTuneJobStatus, situation: Situation, now: datetime
) -> FineTuneJobStatus:
    generation, has_queue = job.metadata.generation, bool(job.spec.queue)
    return describe(status, situation, now, generation, has_queue=has_queue)

"""Conditions of a FineTuneJob: types, reasons, and the conditions of each stage of a job.

`decide` determines the stage of a job, and `describe` maps it to the phase and the conditions,
`Stalled` included. Backends define further reasons, such as `backends/kubernetes/reasons.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from finetune_operator.api.v1alpha1.status import Condition, FineTuneJobStatus, JobPhase
from finetune_operator.backends.base import Effect, Obstacle
from finetune_operator.planner.plan import Expectation


class ConditionType(StrEnum):
    """The condition types of a FineTuneJob."""

    ACCEPTED = "Accepted"
    ADMITTED = "Admitted"
    PLANNED = "Planned"
    RESOURCES_READY = "ResourcesReady"
    RUNNING = "Running"
    CHECKPOINT_READY = "CheckpointReady"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"


class Reason(StrEnum):
    """The reasons of conditions, besides the failure classes of the trainer."""

    ACCEPTED = "Accepted"
    ADMITTED = "Admitted"
    QUEUED = "Queued"
    PROVISIONING = "Provisioning"
    STARTING = "Starting"
    TRAINING = "Training"
    COMPLETING = "Completing"
    PROGRESS_UNKNOWN = "ProgressUnknown"
    RESTARTING = "Restarting"
    COMMITTED = "Committed"
    SUSPENDING = "Suspending"
    SUSPENDED_BY_USER = "SuspendedByUser"
    RESUMED = "Resumed"
    COMPLETED = "Completed"
    DELETING = "Deleting"
    INVALID_SPEC = "InvalidSpec"
    FITS = "Fits"
    TIGHT = "Tight"
    DOES_NOT_FIT = "DoesNotFit"
    MODEL_UNKNOWN = "ModelUnknown"
    CAPACITY_UNKNOWN = "CapacityUnknown"
    FOLDER_IN_USE = "FolderInUse"
    BACKEND_NOT_FOUND = "BackendNotFound"
    BACKEND_FAILED = "BackendFailed"
    CREATION_FAILED = "CreationFailed"
    RESTART_LIMIT_EXCEEDED = "RestartLimitExceeded"
    DISRUPTION_LIMIT_EXCEEDED = "DisruptionLimitExceeded"
    PENDING_DEADLINE_EXCEEDED = "PendingDeadlineExceeded"
    ACTIVE_DEADLINE_EXCEEDED = "ActiveDeadlineExceeded"
    ENDED_BY_OTHERS = "EndedByOthers"


class Stage(StrEnum):
    """Stage of a job; each has a row in the table below."""

    STARTING = "Starting"
    RUNNING = "Running"
    UNHEARD = "Unheard"  # all nodes run, and the progress of rank 0 cannot be read
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    ENDING = "Ending"  # a deadline has passed, and the attempt is being stopped
    SUSPENDED = "Suspended"
    RESUMING = "Resuming"  # no longer suspended, but the next attempt cannot be created yet
    COMPLETE = "Complete"
    FAILED = "Failed"
    REFUSED = "Refused"  # no attempt is possible until a user fixes the cause
    BLOCKED = "Blocked"  # the attempt cannot be created until a user fixes the cause
    OVERRULED = "Overruled"  # another writer marked the job as finished; its attempt is stopping
    ABANDONED = "Abandoned"  # another writer marked the job as finished; its attempt has stopped
    DELETING = "Deleting"  # the job is being deleted, and its attempt is being stopped
    DELETED = "Deleted"  # the job is being deleted, and no attempt runs: a finalizer remains
    HELD = "Held"  # the spec cannot be read; until it can, the attempt is left alone


@dataclass(frozen=True)
class _Row:
    phase: JobPhase | None  # None: the phase is unchanged
    truth: Mapping[ConditionType, bool | None]  # None: the status is Unknown


_T = ConditionType
# Types that a row omits are unchanged. While a job is being stopped its processes still run, so
# `Running` changes only once they are known to be gone.
_TABLE: Mapping[Stage, _Row] = {
    Stage.STARTING: _Row(
        JobPhase.STARTING,
        {_T.RESOURCES_READY: False, _T.RUNNING: False, _T.READY: False, _T.RECONCILING: True},
    ),
    Stage.RUNNING: _Row(
        JobPhase.RUNNING,
        {_T.RESOURCES_READY: True, _T.RUNNING: True, _T.READY: True, _T.RECONCILING: False},
    ),
    Stage.UNHEARD: _Row(
        JobPhase.UNKNOWN,
        {_T.RESOURCES_READY: True, _T.RUNNING: None, _T.READY: False, _T.RECONCILING: True},
    ),
    Stage.RESTARTING: _Row(
        JobPhase.RESTARTING,
        {_T.RESOURCES_READY: False, _T.RUNNING: False, _T.READY: False, _T.RECONCILING: True},
    ),
    Stage.SUSPENDING: _Row(
        JobPhase.SUSPENDING, {_T.SUSPENDED: False, _T.READY: False, _T.RECONCILING: True}
    ),
    Stage.ENDING: _Row(
        JobPhase.SUSPENDING, {_T.FAILED: False, _T.READY: False, _T.RECONCILING: True}
    ),
    Stage.SUSPENDED: _Row(
        JobPhase.SUSPENDED,
        {
            _T.RESOURCES_READY: False,
            _T.RUNNING: False,
            _T.SUSPENDED: True,
            _T.READY: True,  # the spec is satisfied, so that a wait for a suspended job ends
            _T.RECONCILING: False,
        },
    ),
    Stage.RESUMING: _Row(
        JobPhase.SUSPENDED,
        {
            _T.RESOURCES_READY: False,
            _T.RUNNING: False,
            _T.SUSPENDED: True,
            _T.READY: False,
            _T.RECONCILING: True,
        },
    ),
    Stage.COMPLETE: _Row(
        JobPhase.SUCCEEDED,
        {
            _T.RESOURCES_READY: False,
            _T.RUNNING: False,
            _T.COMPLETE: True,
            _T.READY: True,
            _T.RECONCILING: False,
        },
    ),
    Stage.FAILED: _Row(
        JobPhase.FAILED,
        {
            _T.RESOURCES_READY: False,
            _T.RUNNING: False,
            _T.FAILED: True,
            _T.READY: False,
            _T.RECONCILING: False,
            _T.STALLED: True,
        },
    ),
    Stage.REFUSED: _Row(
        JobPhase.PENDING,
        {
            _T.ACCEPTED: False,
            _T.RESOURCES_READY: False,
            _T.RUNNING: False,
            _T.READY: False,
            _T.RECONCILING: False,
            _T.STALLED: True,
        },
    ),
    Stage.BLOCKED: _Row(
        JobPhase.STARTING,
        {
            _T.RESOURCES_READY: False,
            _T.RUNNING: False,
            _T.READY: False,
            _T.RECONCILING: False,
            _T.STALLED: True,
        },
    ),
    Stage.OVERRULED: _Row(
        JobPhase.SUSPENDING, {_T.RUNNING: False, _T.READY: False, _T.RECONCILING: True}
    ),
    Stage.ABANDONED: _Row(
        JobPhase.FAILED,
        {
            _T.RESOURCES_READY: False,
            _T.RUNNING: False,
            _T.READY: False,
            _T.RECONCILING: False,
            _T.STALLED: True,
        },
    ),
    Stage.DELETING: _Row(JobPhase.DELETING, {_T.READY: False, _T.RECONCILING: True}),
    Stage.DELETED: _Row(
        JobPhase.DELETING,
        {_T.RESOURCES_READY: False, _T.RUNNING: False, _T.READY: False, _T.RECONCILING: True},
    ),
    Stage.HELD: _Row(
        None, {_T.ACCEPTED: False, _T.READY: False, _T.RECONCILING: False, _T.STALLED: True}
    ),
}


@dataclass(frozen=True)
class Situation:
    """A stage, with the reason and message of its conditions.

    Attributes:
        reason: A CamelCase word: a `Reason`, or a failure class of the trainer.
        message: A sentence that must not depend on the time, because every reconcile would rewrite
            it.
        exists: Whether the attempt was observed. If so, a queue has admitted it, unless `reason` is
            Queued.
        meanwhile: State of the attempt in this stage; appended to the messages of Ready and
            Reconciling.
        obstacle: The obstacle to the attempt. If it stalls the job, Stalled is set in any stage.
        suspended: Message of Suspended for a job that remains suspended in a stage without it.
    """

    stage: Stage
    reason: str
    message: str
    exists: bool = False
    meanwhile: str = ""
    obstacle: Obstacle | None = None
    suspended: str = ""

    def has(self, effect: Effect) -> bool:
        """Whether the obstacle has this effect."""
        return self.obstacle is not None and self.obstacle.effect is effect


def stage_of_start(attempt: int) -> Stage:
    """Return the stage of a job whose attempt with this number does not train yet."""
    return Stage.STARTING if attempt == 1 else Stage.RESTARTING


def starting(attempt: int) -> Situation:
    """Return the situation of a job whose attempt with this number starts."""
    text = f"attempt {attempt} is starting"
    return Situation(stage_of_start(attempt), Reason.PROVISIONING, text)


def rfc3339(moment: datetime) -> str:
    """Return a time in the format of the API server: UTC, whole seconds, `Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_rfc3339(text: str) -> datetime:
    """Parse a time in the format of `rfc3339`."""
    return datetime.fromisoformat(text)


def find(status: FineTuneJobStatus, kind: ConditionType) -> Condition | None:
    """Return the condition of that type, or None."""
    return next((found for found in status.conditions if found.type == kind), None)


def is_true(status: FineTuneJobStatus, kind: ConditionType) -> bool:
    """Whether the condition exists and is True."""
    found = find(status, kind)
    return found is not None and found.status == "True"


def is_unheard(status: FineTuneJobStatus) -> bool:
    """Whether it is unknown if the attempt trains, because its progress cannot be read."""
    found = find(status, ConditionType.RUNNING)
    return found is not None and found.status == "Unknown"


def is_finished(status: FineTuneJobStatus) -> bool:
    """Whether the job is Complete or Failed, which is final."""
    return is_true(status, ConditionType.COMPLETE) or is_true(status, ConditionType.FAILED)


def is_settled(status: FineTuneJobStatus) -> bool:
    """Whether the job changes only if a user acts: it is Complete, Failed or Suspended."""
    return is_finished(status) or is_true(status, ConditionType.SUSPENDED)


def set_condition(
    conditions: Iterable[Condition], new: Condition, now: datetime
) -> list[Condition]:
    """Replace the condition of the same type by `new`, or append `new`.

    `lastTransitionTime` is `now` if the status changed; otherwise it is unchanged.
    """
    result = list(conditions)
    for index, old in enumerate(result):
        if old.type == new.type:
            since = _since(old, new.status, now)
            result[index] = new.model_copy(update={"last_transition_time": since})
            return result
    return [*result, new.model_copy(update={"last_transition_time": rfc3339(now)})]


def planned(
    status: FineTuneJobStatus, expectation: Expectation | None, now: datetime, generation: int
) -> FineTuneJobStatus:
    """Return the status with the condition Planned, if there is a forecast."""
    if expectation is None:
        return status
    truth = "Unknown" if expectation.fits is None else str(expectation.fits)
    new = Condition(
        type=ConditionType.PLANNED,
        status=truth,
        reason=expectation.reason,
        message=expectation.message,
        observed_generation=generation,
    )
    return status.model_copy(update={"conditions": set_condition(status.conditions, new, now)})


def _since(old: Condition | None, status: str, now: datetime) -> str:
    """Return since when a condition has this status; `now` for the CRD's default conditions.

    The default conditions of version 0.1.0 had the epoch as their time.
    """
    if old is None or old.status != status or old.last_transition_time in (None, _EPOCH):
        return rfc3339(now)
    return old.last_transition_time


def _content(condition: Condition) -> tuple[object, ...]:
    """Return the fields of a condition except its type and its time."""
    return (condition.status, condition.reason, condition.message, condition.observed_generation)


_WITH_MEANWHILE = frozenset({ConditionType.READY, ConditionType.RECONCILING})
_EPOCH = "1970-01-01T00:00:00Z"
_BEING_DELETED = frozenset({Stage.DELETING, Stage.DELETED})
_ACTIVE = frozenset({Stage.STARTING, Stage.RUNNING, Stage.UNHEARD, Stage.RESTARTING})


def _admission(
    admitted: Condition | None, situation: Situation, *, has_queue: bool
) -> tuple[bool, str, str] | None:
    """Return status, reason and message of Admitted; None to leave the condition unchanged.

    A job without `spec.queue` may be queued, too: a cluster may set a default queue for all jobs.
    """
    if situation.has(Effect.QUEUED):
        return False, Reason.QUEUED, situation.message
    if situation.has(Effect.UNADMITTED):
        return False, situation.reason, situation.message
    if situation.exists and (has_queue or (admitted is not None and admitted.status == "False")):
        return True, Reason.ADMITTED, "the queue has admitted the job"
    if has_queue and situation.reason == Reason.CREATION_FAILED:
        return False, Reason.CREATION_FAILED, situation.message
    if not has_queue and admitted is None:
        return True, Reason.ADMITTED, "no queue holds the job"
    return None


def describe(
    status: FineTuneJobStatus,
    situation: Situation,
    now: datetime,
    generation: int,
    *,
    has_queue: bool = False,
) -> FineTuneJobStatus:
    """Return the status with the phase and the conditions of `situation`.

    Args:
        status: The current status.
        situation: The situation of the job.
        now: Time with a zone.
        generation: Generation of the spec that was reconciled.
        has_queue: Whether the spec names a queue.
    """
    row = _TABLE[situation.stage]
    conditions = {condition.type: condition for condition in status.conditions}

    def put(kind: ConditionType, value: bool | None, reason: str, message: str) -> None:
        old, new_status = conditions.get(kind), "Unknown" if value is None else str(value)
        if old is not None and _content(old) == (new_status, reason, message, generation):
            return
        conditions[kind] = Condition(
            type=kind,
            status=new_status,
            reason=reason,
            message=message,
            last_transition_time=_since(old, new_status, now),
            observed_generation=generation,
        )

    is_judged = situation.stage not in _BEING_DELETED  # a deleted job needs no admission
    is_accepted = ConditionType.ACCEPTED in row.truth or is_true(status, ConditionType.ACCEPTED)
    if is_judged and not is_accepted:
        put(ConditionType.ACCEPTED, True, Reason.ACCEPTED, "the spec is valid")
    if is_judged and row.truth.get(ConditionType.ACCEPTED, True):
        admitted = find(status, ConditionType.ADMITTED)
        if (admission := _admission(admitted, situation, has_queue=has_queue)) is not None:
            put(ConditionType.ADMITTED, *admission)
    for kind, value in row.truth.items():
        has_resources = (
            kind is ConditionType.RESOURCES_READY and situation.reason == Reason.STARTING
        )
        text = situation.message
        if situation.meanwhile and kind in _WITH_MEANWHILE:
            text = f"{text}; {situation.meanwhile}"
        put(kind, True if has_resources else value, situation.reason, text)
    if ConditionType.STALLED not in row.truth:
        obstacle = situation.obstacle
        source = obstacle if obstacle is not None and obstacle.is_stalled else situation
        put(ConditionType.STALLED, source is obstacle, source.reason, source.message)
    if situation.suspended:
        put(ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER, situation.suspended)
    was_suspended = find(status, ConditionType.SUSPENDED) is not None
    if was_suspended and situation.stage in _ACTIVE:
        put(ConditionType.SUSPENDED, False, Reason.RESUMED, "spec.suspend is false")
    if (last := status.checkpoint.last) is not None:
        text = f"the newest committed checkpoint is of step {last.step}"
        put(ConditionType.CHECKPOINT_READY, True, Reason.COMMITTED, text)
    waits = situation.has(Effect.QUEUED) and situation.stage in _ACTIVE
    return status.model_copy(
        update={
            "phase": JobPhase.QUEUED if waits else row.phase or status.phase,
            "conditions": list(conditions.values()),
            "observed_generation": generation,
        }
    )

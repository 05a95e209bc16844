"""Conditions of a FineTuneJob: their types, their reasons, and what each stage of a job says.

`decide` names the stage a job is in; the table here turns it into the phase and the conditions.
Reasons stand here and nowhere else.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from finetune_operator.api.v1alpha1.status import Condition, FineTuneJobStatus, JobPhase
from finetune_operator.backends.base import Effect, Obstacle


class ConditionType(StrEnum):
    """Every condition a FineTuneJob can carry."""

    ACCEPTED = "Accepted"
    ADMITTED = "Admitted"
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
    """Every reason a condition gives, besides the failure classes of the trainer."""

    ACCEPTED = "Accepted"
    ADMITTED = "Admitted"
    QUEUED = "Queued"
    PROVISIONING = "Provisioning"
    STARTING = "Starting"
    TRAINING = "Training"
    RESTARTING = "Restarting"
    COMMITTED = "Committed"
    SUSPENDING = "Suspending"
    SUSPENDED_BY_USER = "SuspendedByUser"
    RESUMED = "Resumed"
    COMPLETED = "Completed"
    DELETING = "Deleting"
    REFUSED = "Refused"
    INVALID_SPEC = "InvalidSpec"
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
    """Where a job stands; each one has a row in the table below."""

    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    ENDING = "Ending"  # being stopped because a deadline has passed
    SUSPENDED = "Suspended"
    RESUMING = "Resuming"  # suspended no more, and its next attempt cannot be created yet
    COMPLETE = "Complete"
    FAILED = "Failed"
    REFUSED = "Refused"  # no attempt can be made of it, until somebody fixes the cause
    BLOCKED = "Blocked"  # its attempt cannot be created, until somebody fixes the cause
    OVERRULED = "Overruled"  # being stopped because somebody else wrote that it is finished
    ABANDONED = "Abandoned"  # stopped for that
    DELETING = "Deleting"  # it is being deleted, and its attempt stopped
    DELETED = "Deleted"  # ... and nothing of it runs: finalizers of others keep it
    HELD = "Held"  # its spec cannot be read, and its attempt is left as it is until then


@dataclass(frozen=True)
class _Row:
    phase: JobPhase | None  # None for the one it had
    says: Mapping[ConditionType, bool]


_T = ConditionType
# A type that a row leaves out keeps what it said before: while a job is being stopped its
# processes still run, and `Running` changes only once they are known to be gone.
_TABLE: Mapping[Stage, _Row] = {
    Stage.STARTING: _Row(
        JobPhase.STARTING,
        {_T.RESOURCES_READY: False, _T.RUNNING: False, _T.READY: False, _T.RECONCILING: True},
    ),
    Stage.RUNNING: _Row(
        JobPhase.RUNNING,
        {_T.RESOURCES_READY: True, _T.RUNNING: True, _T.READY: True, _T.RECONCILING: False},
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
            _T.READY: True,  # as its spec asks for: who waits for a suspended job has waited enough
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
    """A stage with what is to be said about it.

    Attributes:
        reason: One CamelCase word: a `Reason`, or a failure class of the trainer.
        message: One sentence; must not depend on the time, else every reconcile writes it anew.
        exists: Whether the attempt was seen: unless `reason` is Queued, no queue keeps it.
        meanwhile: What happens until then, which Ready and Reconciling say besides.
        obstacle: What is in the way; one that stalls the job says so whatever its stage.
        suspended: What a job that stays suspended says of that, where its stage does not.
    """

    stage: Stage
    reason: str
    message: str
    exists: bool = False
    meanwhile: str = ""
    obstacle: Obstacle | None = None
    suspended: str = ""

    def has(self, effect: Effect) -> bool:
        """Say whether what is in the way has this effect."""
        return self.obstacle is not None and self.obstacle.effect is effect


def stage_of_start(attempt: int) -> Stage:
    """Return the stage of a job whose attempt of that number does not train yet."""
    return Stage.STARTING if attempt == 1 else Stage.RESTARTING


def starting(attempt: int) -> Situation:
    """Return the situation of a job whose attempt of that number begins."""
    text = f"attempt {attempt} is starting"
    return Situation(stage_of_start(attempt), Reason.PROVISIONING, text)


def rfc3339(moment: datetime) -> str:
    """Return the moment as the API server writes times: UTC, whole seconds, `Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_rfc3339(text: str) -> datetime:
    """Return the moment that `rfc3339` wrote down."""
    return datetime.fromisoformat(text)


def find(status: FineTuneJobStatus, kind: ConditionType) -> Condition | None:
    """Return the condition of that type, or None."""
    return next((found for found in status.conditions if found.type == kind), None)


def is_true(status: FineTuneJobStatus, kind: ConditionType) -> bool:
    """Say whether the condition is there and True."""
    found = find(status, kind)
    return found is not None and found.status == "True"


def is_finished(status: FineTuneJobStatus) -> bool:
    """Say whether the job is Complete or Failed, which is final."""
    return is_true(status, ConditionType.COMPLETE) or is_true(status, ConditionType.FAILED)


def is_settled(status: FineTuneJobStatus) -> bool:
    """Say whether nothing happens any more by itself: Complete, Failed or Suspended."""
    return is_finished(status) or is_true(status, ConditionType.SUSPENDED)


def set_condition(
    conditions: Iterable[Condition], new: Condition, now: datetime
) -> list[Condition]:
    """Put `new` in the place of the condition of its type, or at the end.

    `lastTransitionTime` is `now` where the status changed, else it is kept.
    """
    made = list(conditions)
    for place, old in enumerate(made):
        if old.type == new.type:
            kept = old.last_transition_time if old.status == new.status else None
            made[place] = new.model_copy(update={"last_transition_time": kept or rfc3339(now)})
            return made
    return [*made, new.model_copy(update={"last_transition_time": rfc3339(now)})]


def _gist(one: Condition) -> tuple[object, ...]:
    """Return what a condition says, apart from its type and its time."""
    return (one.status, one.reason, one.message, one.observed_generation)


_IS_TOLD_MORE = frozenset({ConditionType.READY, ConditionType.RECONCILING})
_IS_DELETED = frozenset({Stage.DELETING, Stage.DELETED})
_GOES_ON = frozenset({Stage.STARTING, Stage.RUNNING, Stage.RESTARTING})


def _admission(
    admitted: Condition | None, situation: Situation, *, has_queue: bool
) -> tuple[bool, str, str] | None:
    """Return what Admitted is to say; None for what it says already, or for nothing.

    A job without `spec.queue` may be queued, too: a cluster may name a queue for all jobs.
    """
    if situation.has(Effect.QUEUED):
        return False, Reason.QUEUED, situation.message
    if situation.exists and (has_queue or (admitted is not None and admitted.status == "False")):
        return True, Reason.ADMITTED, "the queue let it go"
    if has_queue and situation.reason == Reason.CREATION_FAILED:
        return False, Reason.CREATION_FAILED, situation.message
    if not has_queue and admitted is None:
        return True, Reason.ADMITTED, "there is no queue to wait for"
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
        status: As it was.
        situation: What is to be said.
        now: Time with a zone.
        generation: Of the spec that was reconciled.
        has_queue: Whether the spec names a queue.
    """
    row = _TABLE[situation.stage]
    conditions = {one.type: one for one in status.conditions}

    def say(kind: ConditionType, value: bool, reason: str, message: str) -> None:
        old, now_says = conditions.get(kind), str(value)
        if old is not None and _gist(old) == (now_says, reason, message, generation):
            return
        since = old.last_transition_time if old is not None and old.status == now_says else None
        conditions[kind] = Condition(
            type=kind,
            status=now_says,
            reason=reason,
            message=message,
            last_transition_time=since or rfc3339(now),
            observed_generation=generation,
        )

    is_judged = situation.stage not in _IS_DELETED  # else nobody asks any more
    is_accepted = ConditionType.ACCEPTED in row.says or is_true(status, ConditionType.ACCEPTED)
    if is_judged and not is_accepted:
        say(ConditionType.ACCEPTED, True, Reason.ACCEPTED, "the spec is valid")
    if is_judged and row.says.get(ConditionType.ACCEPTED, True):
        admitted = find(status, ConditionType.ADMITTED)
        if (admission := _admission(admitted, situation, has_queue=has_queue)) is not None:
            say(ConditionType.ADMITTED, *admission)
    for kind, value in row.says.items():
        has_resources = (
            kind is ConditionType.RESOURCES_READY and situation.reason == Reason.STARTING
        )
        text = situation.message
        if situation.meanwhile and kind in _IS_TOLD_MORE:
            text = f"{text}; {situation.meanwhile}"
        say(kind, value or has_resources, situation.reason, text)
    if ConditionType.STALLED not in row.says:
        one = situation.obstacle if situation.has(Effect.STALLED) else None
        about = one or situation
        say(ConditionType.STALLED, one is not None, about.reason, about.message)
    if situation.suspended:
        say(ConditionType.SUSPENDED, True, Reason.SUSPENDED_BY_USER, situation.suspended)
    was_suspended = find(status, ConditionType.SUSPENDED) is not None
    if was_suspended and situation.stage in _GOES_ON:
        say(ConditionType.SUSPENDED, False, Reason.RESUMED, "spec.suspend is false")
    if (last := status.checkpoint.last) is not None:
        text = f"the newest committed checkpoint is of step {last.step}"
        say(ConditionType.CHECKPOINT_READY, True, Reason.COMMITTED, text)
    waits = situation.has(Effect.QUEUED) and situation.stage in _GOES_ON
    return status.model_copy(
        update={
            "phase": JobPhase.QUEUED if waits else row.phase or status.phase,
            "conditions": list(conditions.values()),
            "observed_generation": generation,
        }
    )

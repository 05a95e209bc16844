"""Decides the course and the deadlines of the open attempt, and describes them. Pure.

`decide` calls it for an attempt that has or may have processes, and for the deadlines of an attempt
that is not created yet.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.lifecycle import Deadlines
from finetune_operator.api.v1alpha1.status import AttemptStatus, FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Effect, Observation, Obstacle
from finetune_operator.backends.root_cause import NO_EXIT_CODE
from finetune_operator.reconcile.attempts import active_since, first_without_nodes, given_up
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    Situation,
    Stage,
    find,
    is_true,
    parse_rfc3339,
    stage_of_start,
)
from finetune_operator.reconcile.watching import describe_stop, watch
from finetune_trainer.config import ExitCode, FailureClass, Termination

LOST_NODE_GRACE_SECONDS = 10.0
"""Grace period of a gang that has lost a node: it can no longer save a checkpoint."""

RENDEZVOUS_SECONDS = 600.0
"""Time for the ranks to arrive at the rendezvous once all nodes run."""

_WITHOUT_OBSTACLE = (Reason.PROVISIONING, Reason.RESTARTING)
_DEADLINES = (Reason.PENDING_DEADLINE_EXCEEDED, Reason.ACTIVE_DEADLINE_EXCEEDED)


@dataclass(frozen=True)
class Deadline:
    """A deadline of a job.

    Attributes:
        at: Time of the deadline.
        reason: Reason of the job's failure after the deadline.
        limit: Clause about the limit.
        obstacle: The obstacle until the deadline; empty if it does not matter.
    """

    at: datetime
    reason: Reason
    limit: str
    obstacle: str = ""

    @property
    def message(self) -> str:
        """Message of the failure, with the remedy."""
        remedy = "raise the limit, then create the job again"
        if not self.obstacle:
            return f"{self.limit}; {remedy}"
        return f"{self.limit}: {self.obstacle}; remove this obstacle or {remedy}"


@dataclass(frozen=True)
class Course:
    """The next course of an attempt.

    Attributes:
        situation: Situation of the job; None if it is unchanged.
        grace_seconds: Seconds until the attempt has to be stopped; None if it continues.
        requeue_seconds: Delay of the next decision if no event occurs; None to wait for an event.
        given_up: Termination to record, because the operator ends the attempt; None otherwise.
    """

    situation: Situation | None
    grace_seconds: float | None = None
    requeue_seconds: float | None = None
    given_up: Termination | None = None


def follow(
    spec: FineTuneJobSpec,
    status: FineTuneJobStatus,
    attempt: AttemptStatus,
    observation: Observation,
    now: datetime,
) -> Course:
    """Return the next course of an attempt that has processes.

    Args:
        spec: Spec of the job.
        status: Status of the job.
        attempt: The open attempt.
        observation: Observation of the attempt.
        now: Time with a zone.
    """
    limits = _limits(spec.deadlines, status, observation, now)
    passed = next((limit for limit in limits if limit.at <= now), None)
    delays = [(limit.at - now).total_seconds() for limit in limits if limit.at > now]
    left, end = _rendezvous_left(status, observation, now), None
    if left is not None and left > 0:
        delays.append(left)
    if observation.requeue_seconds is not None:
        delays.append(observation.requeue_seconds)
    requeue = min(delays, default=None)
    stop_in: float | None = None
    grace = float(spec.deadlines.termination_grace_seconds)
    ending = ending_for(status) or (passed and (passed.reason, passed.message))
    saves = spec.checkpoint.enabled is not False
    if ending:
        stops = describe_stop(status, attempt, observation, grace, saves=saves)
        stops = "; ".join(filter(None, (stops, observation.warning)))
        situation = Situation(Stage.ENDING, *ending, meanwhile=stops, obstacle=observation.obstacle)
        return Course(situation, grace, requeue, _without_nodes(*ending))
    if spec.suspend or is_suspending(status):
        stops = describe_stop(status, attempt, observation, grace, saves=saves)
        situation, stop_in = Situation(Stage.SUSPENDING, Reason.SUSPENDING, stops), grace
    elif observation.phase is AttemptPhase.UNKNOWN:
        if observation.obstacle is None or not _was_waiting(status):
            return Course(None, None, requeue)
        reason, message = observation.obstacle.reason, observation.obstacle.message
        situation = Situation(stage_of_start(attempt.number), reason, message)
    elif observation.phase is AttemptPhase.FAILED or (end := _give_up(attempt, observation, left)):
        cause = end or given_up(attempt) or observation
        text = cause.message or f"attempt {attempt.number} lost a node"
        text = f"{text}; waiting until all of its processes are gone"
        situation = Situation(Stage.RESTARTING, Reason.RESTARTING, text)
        stop_in = _remaining_grace(observation, grace)
    elif observation.outlived_by:
        text = f"attempt {attempt.number} has completed; {observation.outlived_by}"
        situation = Situation(Stage.RUNNING, Reason.COMPLETING, text, exists=True)
        stop_in = min(grace, LOST_NODE_GRACE_SECONDS)
    elif (watched := watch(attempt, status, observation)) is not None:
        situation = watched
    else:
        return Course(None, None, requeue)
    lost = given_up(attempt)
    has_named_node = lost is not None and lost.failure_class is FailureClass.NODE_LOST
    if observation.warning and not has_named_node:
        situation = replace(situation, message=f"{situation.message}; {observation.warning}")
    return Course(replace(situation, obstacle=observation.obstacle), stop_in, requeue, end)


def _rendezvous_left(
    status: FineTuneJobStatus, observation: Observation, now: datetime
) -> float | None:
    """Return the seconds left for missing ranks to arrive; None if rank 0 waits for no rank.

    The time counts while all nodes run and rank 0 waits. Rank 0's own clock gives the age of its
    process, which may be younger than the attempt.
    """
    ready, report = find(status, ConditionType.RESOURCES_READY), observation.progress
    if observation.phase is not AttemptPhase.RUNNING or report is None or not report.waits_for:
        return None
    if ready is None or ready.status == "False" or ready.last_transition_time is None:
        return RENDEZVOUS_SECONDS
    waited = (now - parse_rfc3339(ready.last_transition_time)).total_seconds()
    age = report.spent.starting if report.spent is not None else 0.0
    return RENDEZVOUS_SECONDS - min(waited, age)


def _give_up(
    attempt: AttemptStatus, observation: Observation, rendezvous_left: float | None
) -> Termination | None:
    """Return the termination of an attempt that the operator ends; None if the attempt continues.

    The status records it, because the processes of the attempt only report that they were stopped.
    """
    if (recorded := given_up(attempt)) is not None:
        return recorded
    if observation.progress is None or rendezvous_left is None or rendezvous_left > 0:
        return observation.gives_up
    message = (
        f"{observation.progress.waits_for} within {RENDEZVOUS_SECONDS:.0f} s after all nodes ran; "
        "see the logs of those ranks, and whether their nodes reach rank 0's node"
    )
    return Termination(failure_class=FailureClass.HUNG, exit_code=ExitCode.ERROR, message=message)


def is_suspending(status: FineTuneJobStatus) -> bool:
    """Whether the open attempt was asked to stop; true until its processes are gone."""
    found = find(status, ConditionType.SUSPENDED)
    return found is not None and found.reason == Reason.SUSPENDING


def _remaining_grace(observation: Observation, grace: float) -> float:
    """Return the grace period of the remaining nodes after one node has terminated.

    Nodes that stop together after a preemption may still be writing their checkpoint.
    """
    termination, is_preempted = observation.termination, False
    if termination is not None:
        is_preempted = termination.exit_code in (ExitCode.DONE, ExitCode.PREEMPTED)
    if is_preempted or observation.failure_class is FailureClass.PREEMPTED:
        return grace
    return min(grace, LOST_NODE_GRACE_SECONDS)


def active_deadline(limits: Deadlines, status: FineTuneJobStatus) -> Deadline | None:
    """Return the active deadline of the job over all attempts; a resumption restarts it."""
    since = active_since(status)
    if limits.active_seconds is None or since is None:
        return None
    limit = f"the job was active for deadlines.activeSeconds {limits.active_seconds}"
    at = since + timedelta(seconds=limits.active_seconds)
    return Deadline(at, Reason.ACTIVE_DEADLINE_EXCEEDED, limit)


def earliest_limit(
    limits: Deadlines, status: FineTuneJobStatus, now: datetime, obstacle: Obstacle | None = None
) -> Deadline | None:
    """Return the earliest deadline of a job without an attempt in the cluster; None without one.

    Args:
        limits: Deadlines of the job.
        status: Status of the job.
        now: Time with a zone.
        obstacle: The obstacle to creating the open attempt; None between attempts.
    """
    waiting = Observation(AttemptPhase.PENDING, obstacle=obstacle)
    every = _limits(limits, status, waiting, now)
    return min(every, key=lambda limit: limit.at, default=None)


def _limits(
    limits: Deadlines, status: FineTuneJobStatus, observation: Observation, now: datetime
) -> list[Deadline]:
    """Return the deadlines of an open attempt, or between two attempts."""
    both = (active_deadline(limits, status), _pending_deadline(limits, status, observation, now))
    return [deadline for deadline in both if deadline is not None]


def deadline_before_creation(
    spec: FineTuneJobSpec, status: FineTuneJobStatus, now: datetime
) -> Deadline | None:
    """Return the deadline that passed before the open attempt was created, with the obstacle.

    None if no deadline has passed, or without an obstacle. Deadlines of a suspended job do not run.
    """
    found = find(status, ConditionType.RESOURCES_READY)
    if found is None or found.reason != Reason.CREATION_FAILED:
        return None
    if spec.suspend or is_true(status, ConditionType.SUSPENDED):
        return None
    limit = earliest_limit(spec.deadlines, status, now, Obstacle(found.reason, found.message))
    return replace(limit, obstacle=found.message) if limit and limit.at <= now else None


def _pending_deadline(
    limits: Deadlines, status: FineTuneJobStatus, observation: Observation, now: datetime
) -> Deadline | None:
    """Return the deadline of the wait for resources; None if the job does not wait.

    The time counts over consecutive attempts that never had all of their nodes. Time in a queue
    does not count: no nodes are requested before the queue admits the attempt.
    """
    first = first_without_nodes(status)
    if limits.pending_seconds is None or first is None:
        return None
    if observation.phase is AttemptPhase.UNKNOWN:
        is_waiting = _was_waiting(status)
    else:
        is_waiting = observation.phase is AttemptPhase.PENDING
    is_queued = observation.obstacle is not None and observation.obstacle.effect is Effect.QUEUED
    if not is_waiting or is_queued:
        return None
    at = _waiting_since(status, first, now) + timedelta(seconds=limits.pending_seconds)
    limit = f"no resources within deadlines.pendingSeconds {limits.pending_seconds}"
    obstacle = _last_obstacle(status, observation, first)
    return Deadline(at, Reason.PENDING_DEADLINE_EXCEEDED, limit, obstacle)


def _last_obstacle(status: FineTuneJobStatus, observation: Observation, first: datetime) -> str:
    """Return the newest known obstacle since `first`, the start of the wait."""
    if observation.obstacle is not None and observation.obstacle.message:
        return observation.obstacle.message
    ready = find(status, ConditionType.RESOURCES_READY)
    if ready is not None and ready.reason not in _WITHOUT_OBSTACLE:
        return ready.message
    for attempt in reversed(status.attempts):
        if attempt.end_time is not None and parse_rfc3339(attempt.end_time) >= first:
            return attempt.message
    return "the backend has reported no cause"


def _waiting_since(status: FineTuneJobStatus, first: datetime, now: datetime) -> datetime:
    """Return since when the job waits for resources; an attempt may have lost them after its start.

    The result is `now` if the attempt has had its resources, or was queued, until now.
    """
    since = max(first, active_since(status) or first)
    ready = find(status, ConditionType.RESOURCES_READY)
    if ready is not None and ready.last_transition_time is not None:
        if ready.status == "True":
            return now
        since = max(since, parse_rfc3339(ready.last_transition_time))
    admitted = find(status, ConditionType.ADMITTED)
    if admitted is None or admitted.last_transition_time is None:
        return since
    if admitted.reason == Reason.QUEUED:
        return now
    admitted_at = parse_rfc3339(admitted.last_transition_time)
    return max(since, admitted_at) if admitted.status == "True" else since


def _without_nodes(reason: Reason, message: str) -> Termination | None:
    """Return the termination of an attempt that is ended because its nodes did not come."""
    if reason is not Reason.PENDING_DEADLINE_EXCEEDED:
        return None
    failure = FailureClass.NOT_STARTED
    return Termination(failure_class=failure, exit_code=NO_EXIT_CODE, message=message)


def _was_waiting(status: FineTuneJobStatus) -> bool:
    """Whether the open attempt lacked resources at its last observation."""
    found = find(status, ConditionType.RESOURCES_READY)
    return found is not None and found.status == "False" and found.reason != Reason.RESTARTING


def ending_for(status: FineTuneJobStatus) -> tuple[Reason, str] | None:
    """Return reason and message of the deadline for which the job is being stopped, or None.

    The condition `Failed` (still False) stores them, because on a later reconcile the attempt looks
    like any other attempt that is being stopped.
    """
    found = find(status, ConditionType.FAILED)
    if found is None or found.reason not in _DEADLINES:
        return None
    return Reason(found.reason), found.message

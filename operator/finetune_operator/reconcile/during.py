"""The open attempt: its deadlines, what it is to do, and what is to be said of it. Pure.

`decide` asks about an attempt of which a process is left or may be, and for the deadlines of one
that is not created yet.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from finetune_operator.api.paths import show_count
from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.lifecycle import Deadlines
from finetune_operator.api.v1alpha1.status import AttemptStatus, FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Effect, Observation
from finetune_operator.backends.root_cause import STOPPED_BY_SIGNAL
from finetune_operator.reconcile.attempts import active_since, current
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
from finetune_trainer.config import ExitCode, Phase

LOST_NODE_GRACE_SECONDS = 10.0
"""What is left of a gang that lost a node gets no longer: it cannot take a checkpoint any more."""

_BEFORE_TRAINING = frozenset({Phase.STARTING, Phase.TOKENIZING, Phase.LOADING})
_IN_ORDER = frozenset({ExitCode.DONE, ExitCode.PREEMPTED, *STOPPED_BY_SIGNAL})
_DEADLINES = (Reason.PENDING_DEADLINE_EXCEEDED, Reason.ACTIVE_DEADLINE_EXCEEDED)


@dataclass(frozen=True)
class Deadline:
    """One limit of a job.

    Attributes:
        at: When it passes.
        reason: What the job fails with then.
        message: The sentence that goes with it.
        obstacle: What was in the way until then, if that was reported.
    """

    at: datetime
    reason: Reason
    message: str
    obstacle: str = ""


@dataclass(frozen=True)
class Course:
    """How an attempt goes on.

    Attributes:
        situation: What is to be said; None where nothing new is known.
        grace_seconds: Seconds it has to stop in; None to let it go on.
        requeue_seconds: Decide again after so long though nothing happened; None for never.
    """

    situation: Situation | None
    grace_seconds: float | None = None
    requeue_seconds: float | None = None


def follow(
    spec: FineTuneJobSpec,
    status: FineTuneJobStatus,
    attempt: AttemptStatus,
    observation: Observation,
    now: datetime,
) -> Course:
    """Return how an attempt goes on of which something lives.

    Args:
        spec: Of its job.
        status: Of its job.
        attempt: The open one.
        observation: Of it.
        now: Time with a zone.
    """
    limits = _limits(spec.deadlines, status, observation, now)
    passed = next((limit for limit in limits if limit.at <= now), None)
    waits = [(limit.at - now).total_seconds() for limit in limits if limit.at > now]
    if observation.requeue_seconds is not None:
        waits.append(observation.requeue_seconds)
    requeue = min(waits, default=None)
    stop_in: float | None = None
    grace = float(spec.deadlines.termination_grace_seconds)
    ending = ending_for(status) or (passed and (passed.reason, passed.message))
    saves = spec.checkpoint.enabled is not False
    if ending:
        stops = on_its_way(status, attempt, observation, grace, saves=saves)
        situation = Situation(Stage.ENDING, *ending, meanwhile=stops, obstacle=observation.obstacle)
        return Course(situation, grace, requeue)
    if spec.suspend or is_suspending(status):
        stops = on_its_way(status, attempt, observation, grace, saves=saves)
        situation, stop_in = Situation(Stage.SUSPENDING, Reason.SUSPENDING, stops), grace
    elif observation.phase is AttemptPhase.FAILED:
        left = observation.message or f"attempt {attempt.number} lost a node"
        text = f"{left}; waiting until all of its processes are gone"
        situation = Situation(Stage.RESTARTING, Reason.RESTARTING, text)
        stop_in = _grace_of_the_rest(observation, grace)
    elif observation.phase is AttemptPhase.UNKNOWN:
        if observation.obstacle is None or not _is_waiting(status):
            return Course(None, None, requeue)
        reason, message = observation.obstacle.reason, observation.obstacle.message
        situation = Situation(stage_of_start(attempt.number), reason, message)
    else:
        situation = _watching(attempt, status, observation)
    if observation.warning:
        situation = replace(situation, message=f"{situation.message}; {observation.warning}")
    return Course(replace(situation, obstacle=observation.obstacle), stop_in, requeue)


def is_suspending(status: FineTuneJobStatus) -> bool:
    """Say whether the open attempt was asked to stop; it stays so until it is gone."""
    found = find(status, ConditionType.SUSPENDED)
    return found is not None and found.reason == Reason.SUSPENDING


def _grace_of_the_rest(observation: Observation, grace: float) -> float:
    """Nodes that stop together after a preemption may still be writing their checkpoint."""
    termination = observation.termination
    if termination is not None and termination.exit_code in (ExitCode.DONE, ExitCode.PREEMPTED):
        return grace
    return min(grace, LOST_NODE_GRACE_SECONDS)


def _watching(
    attempt: AttemptStatus, status: FineTuneJobStatus, observation: Observation
) -> Situation:
    runs = observation.phase in (AttemptPhase.RUNNING, AttemptPhase.SUCCEEDED)
    if runs and _trains(status, observation):
        text = f"attempt {attempt.number} trains on {show_count(status.nodes.world_size, 'rank')}"
        return Situation(Stage.RUNNING, Reason.TRAINING, text, exists=True)
    stage, obstacle = stage_of_start(attempt.number), observation.obstacle
    if runs and obstacle is None:
        text = f"every node of attempt {attempt.number} runs; ranks meet and load model and data"
        return Situation(stage, Reason.STARTING, text, exists=True)
    text = observation.message or f"attempt {attempt.number} waits for its nodes"
    if obstacle is None:
        return Situation(stage, Reason.PROVISIONING, text, exists=True)
    if obstacle.effect is Effect.STALLED:
        stage = Stage.BLOCKED  # it does not pass by waiting
    reason = Reason.PROVISIONING if obstacle.effect is Effect.NONE else obstacle.reason
    return Situation(stage, reason, obstacle.message or text, exists=True)


def _trains(status: FineTuneJobStatus, observation: Observation) -> bool:
    """Say whether the attempt has begun to train, as far as rank 0 was heard.

    Who was seen to train is believed to while nothing is heard: rank 0 may be the first to end, and
    an operator that starts anew has asked nobody yet.
    """
    if observation.is_training is not None:
        return observation.is_training
    if (said := observation.progress) is not None:
        return said.phase not in _BEFORE_TRAINING
    return is_true(status, ConditionType.RUNNING)


def on_its_way(
    status: FineTuneJobStatus,
    attempt: AttemptStatus,
    observation: Observation,
    grace: float,
    *,
    saves: bool = True,
) -> str:
    """Return what the attempt does, as a part of a sentence.

    Args:
        status: The job's, with what it says about the attempt.
        attempt: The open one.
        observation: Of it.
        grace: Seconds after which what is left of it is killed.
        saves: It makes checkpoints.
    """
    who, killed = f"attempt {attempt.number}", f"what is left of it after {grace:g} s is killed"
    if _trains(status, observation):
        if _has_lost_a_node(observation):
            return f"{who} has lost a node and stops without another checkpoint; {killed}"
        if not saves:
            return f"{who} stops without a checkpoint (spec.checkpoint.enabled); {killed}"
        return f"{who} saves a checkpoint of its newest step and stops; {killed}"
    if not observation.nodes_ready:
        return f"{who} is ended before it began to train"
    return f"{who} stops before it trains, as there is nothing to save; {killed}"


def _has_lost_a_node(observation: Observation) -> bool:
    termination = observation.termination
    if termination is None or observation.phase is not AttemptPhase.FAILED:
        return False
    return termination.exit_code not in _IN_ORDER


def active_deadline(limits: Deadlines, status: FineTuneJobStatus) -> Deadline | None:
    """Return the end of the job's life, over all attempts; suspension starts a new life."""
    since = active_since(status)
    if limits.active_seconds is None or since is None:
        return None
    message = f"the job was active for deadlines.activeSeconds {limits.active_seconds}"
    at = since + timedelta(seconds=limits.active_seconds)
    return Deadline(at, Reason.ACTIVE_DEADLINE_EXCEEDED, message)


def _limits(
    limits: Deadlines, status: FineTuneJobStatus, observation: Observation, now: datetime
) -> list[Deadline]:
    """Return the deadlines that an open attempt has to keep."""
    both = (active_deadline(limits, status), _pending_deadline(limits, status, observation, now))
    return [one for one in both if one is not None]


def deadline_before_creation(
    spec: FineTuneJobSpec, status: FineTuneJobStatus, now: datetime
) -> Deadline | None:
    """Return the deadline that passed before the open attempt was created, with what is in the way.

    None where none has, or nothing was in the way: no deadline of a suspended job runs.
    """
    found = find(status, ConditionType.RESOURCES_READY)
    if found is None or found.reason != Reason.CREATION_FAILED:
        return None
    if spec.suspend or is_true(status, ConditionType.SUSPENDED):
        return None
    limits = _limits(spec.deadlines, status, Observation(AttemptPhase.PENDING), now)
    passed = next((limit for limit in limits if limit.at <= now), None)
    return passed and replace(passed, obstacle=found.message)


def _pending_deadline(
    limits: Deadlines, status: FineTuneJobStatus, observation: Observation, now: datetime
) -> Deadline | None:
    """Return the end of the open attempt's wait for resources; None where it does not wait for any.

    Time in a queue does not count: nobody searches for nodes before the queue lets the attempt go.
    """
    attempt = current(status)
    if limits.pending_seconds is None or attempt is None or attempt.start_time is None:
        return None
    if observation.phase is AttemptPhase.UNKNOWN:
        waits = _is_waiting(status)
    else:
        waits = observation.phase is AttemptPhase.PENDING
    is_queued = observation.obstacle is not None and observation.obstacle.effect is Effect.QUEUED
    if not waits or is_queued:
        return None
    since = _waits_since(status, parse_rfc3339(attempt.start_time), now)
    message = f"no resources within deadlines.pendingSeconds {limits.pending_seconds}"
    at = since + timedelta(seconds=limits.pending_seconds)
    return Deadline(at, Reason.PENDING_DEADLINE_EXCEEDED, message)


def _waits_since(status: FineTuneJobStatus, opened: datetime, now: datetime) -> datetime:
    """Return since when the attempt waits: for its resources, which it may have had and lost.

    Now, if it had them till now, or was in its queue.
    """
    ready = find(status, ConditionType.RESOURCES_READY)
    if ready is not None and ready.last_transition_time is not None:
        if ready.status == "True":
            return now
        opened = max(opened, parse_rfc3339(ready.last_transition_time))
    admitted = find(status, ConditionType.ADMITTED)
    if admitted is None or admitted.last_transition_time is None:
        return opened
    if admitted.reason == Reason.QUEUED:
        return now
    let_go = parse_rfc3339(admitted.last_transition_time)
    return max(opened, let_go) if admitted.status == "True" else opened


def _is_waiting(status: FineTuneJobStatus) -> bool:
    """Say whether the open attempt had not all of its resources when it was seen last."""
    found = find(status, ConditionType.RESOURCES_READY)
    return found is not None and found.status == "False" and found.reason != Reason.RESTARTING


def ending_for(status: FineTuneJobStatus) -> tuple[Reason, str] | None:
    """Return the deadline for which the job is already being stopped, or None.

    It is kept in the condition `Failed` (still False), as the attempt that is stopped for it looks
    like any other on a later reconcile.
    """
    found = find(status, ConditionType.FAILED)
    if found is None or found.reason not in _DEADLINES:
        return None
    return Reason(found.reason), found.message

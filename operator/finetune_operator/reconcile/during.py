"""What an attempt that lives is to do, and what is to be said of it: stop, wait, or go on. Pure.

`decide` asks while a process of the attempt is left, or may be.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from finetune_operator.api.paths import show_count
from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.status import AttemptStatus, FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.reconcile import deadlines
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    Situation,
    Stage,
    find,
    stage_of_start,
)
from finetune_operator.reconcile.stopping import on_its_way, trains
from finetune_trainer.config import ExitCode

LOST_NODE_GRACE_SECONDS = 10.0
"""What is left of a gang that lost a node gets no longer: it cannot take a checkpoint any more."""


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
    limits = deadlines.of_attempt(spec.deadlines, status, observation, now)
    passed = next((limit for limit in limits if limit.at <= now), None)
    waits = [(limit.at - now).total_seconds() for limit in limits if limit.at > now]
    if observation.look_again_seconds is not None:
        waits.append(observation.look_again_seconds)
    requeue = min(waits, default=None)
    stop_in: float | None = None
    grace = float(spec.deadlines.termination_grace_seconds)
    ending = deadlines.ending(status) or (passed and (passed.reason, passed.message))
    if ending:
        stops = on_its_way(status, attempt, observation, grace)
        return Course(Situation(Stage.ENDING, *ending, meanwhile=stops), grace, requeue)
    if spec.suspend or is_suspending(status):
        stops = on_its_way(status, attempt, observation, grace)
        situation, stop_in = Situation(Stage.SUSPENDING, Reason.SUSPENDING, stops), grace
    elif observation.phase is AttemptPhase.FAILED:
        left = observation.message or f"attempt {attempt.number} lost a node"
        text = f"{left}; waiting until all of its processes are gone"
        situation = Situation(Stage.RESTARTING, Reason.RESTARTING, text)
        stop_in = _grace_of_the_rest(observation, grace)
    elif observation.phase is AttemptPhase.UNKNOWN:
        if not observation.reason or not deadlines.is_waiting(status):
            return Course(None, None, requeue)
        stage = stage_of_start(attempt.number)
        situation = Situation(stage, observation.reason, observation.message)
    else:
        situation = _watching(attempt, status, observation)
    if observation.warning:
        situation = replace(situation, message=f"{situation.message}; {observation.warning}")
    return Course(situation, stop_in, requeue)


def is_suspending(status: FineTuneJobStatus) -> bool:
    """Say whether the open attempt was told to stop; it stays so until it is gone."""
    found = find(status, ConditionType.SUSPENDED)
    return found is not None and found.reason == Reason.SUSPENDING


def _grace_of_the_rest(observation: Observation, grace: float) -> float:
    """Nodes that stop together after a preemption may still be writing their checkpoint."""
    words = observation.termination
    if words is not None and words.exit_code in (ExitCode.DONE, ExitCode.PREEMPTED):
        return grace
    return min(grace, LOST_NODE_GRACE_SECONDS)


def _watching(
    attempt: AttemptStatus, status: FineTuneJobStatus, observation: Observation
) -> Situation:
    runs = observation.phase in (AttemptPhase.RUNNING, AttemptPhase.SUCCEEDED)
    if runs and trains(status, observation):
        text = f"attempt {attempt.number} trains on {show_count(status.nodes.world_size, 'rank')}"
        return Situation(Stage.RUNNING, Reason.TRAINING, text, exists=True)
    stage = stage_of_start(attempt.number)
    if runs and not observation.reason:
        text = f"every node of attempt {attempt.number} runs; ranks meet and load model and data"
        return Situation(stage, Reason.STARTING, text, exists=True)
    text = observation.message or f"attempt {attempt.number} waits for its nodes"
    if observation.reason == Reason.CREATION_FAILED:
        stage = Stage.BLOCKED  # it does not pass by waiting
    return Situation(stage, observation.reason or Reason.PROVISIONING, text, exists=True)

"""Describe an attempt with processes: whether it trains, why it does not, and how it stops. Pure.

`during` and `deleting` call it.
"""

from finetune_operator.api.paths import show_count
from finetune_operator.api.v1alpha1.status import AttemptStatus, FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Effect, Observation
from finetune_operator.backends.root_cause import STOPPED_BY_SIGNAL
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    Situation,
    Stage,
    is_true,
    is_unheard,
    stage_of_start,
)
from finetune_trainer.config import ExitCode, Phase

_BEFORE_TRAINING = frozenset({Phase.STARTING, Phase.TOKENIZING, Phase.LOADING})
_ORDERLY_EXITS = frozenset({ExitCode.DONE, ExitCode.PREEMPTED, *STOPPED_BY_SIGNAL})


def watch(
    attempt: AttemptStatus, status: FineTuneJobStatus, observation: Observation
) -> Situation | None:
    """Return the situation of an attempt that may train; None if the last one still applies."""
    runs = observation.phase in (AttemptPhase.RUNNING, AttemptPhase.SUCCEEDED)
    trains = _trains(status, observation) if runs else False
    if trains:
        text = f"attempt {attempt.number} trains on {show_count(status.nodes.world_size, 'rank')}"
        return Situation(Stage.RUNNING, Reason.TRAINING, text, exists=True)
    stage, obstacle = stage_of_start(attempt.number), observation.obstacle
    if trains is None:
        if observation.unheard:
            return _unheard(attempt, status, observation)
        if obstacle is None or not obstacle.is_stalled:
            return None
        return Situation(Stage.UNHEARD, obstacle.reason, obstacle.message, exists=True)
    if runs and obstacle is None:
        progress = observation.progress
        activity = progress.waits_for if progress is not None else None
        activity = activity or "ranks connect and load model and data"
        text = f"all nodes of attempt {attempt.number} run; {activity}"
        return Situation(stage, Reason.STARTING, text, exists=True)
    text = observation.message or f"attempt {attempt.number} waits for its nodes"
    if obstacle is None:
        return Situation(stage, Reason.PROVISIONING, text, exists=True)
    if obstacle.is_stalled:
        stage = Stage.BLOCKED  # waiting does not help
    reason = Reason.PROVISIONING if obstacle.effect is Effect.NONE else obstacle.reason
    return Situation(stage, reason, obstacle.message or text, exists=True)


def _unheard(
    attempt: AttemptStatus, status: FineTuneJobStatus, observation: Observation
) -> Situation:
    """Return the situation of an attempt that runs and whose progress cannot be read."""
    text = (
        f"it is not known whether attempt {attempt.number} trains: {observation.unheard}; "
        f"{_last_report(attempt, status)}"
    )
    reason, obstacle = str(Reason.PROGRESS_UNKNOWN), observation.obstacle
    if obstacle is not None and obstacle.effect is not Effect.NONE:
        reason = obstacle.reason
        text = f"{obstacle.message}; {text}" if obstacle.message else text
    return Situation(Stage.UNHEARD, reason, text, exists=True)


def _last_report(attempt: AttemptStatus, status: FineTuneJobStatus) -> str:
    """Return a clause with the last step that the attempt reported, and the time of the report."""
    if attempt.last_step is None or status.progress is None:
        return "it has not reported a step"
    return f"its last report was of step {attempt.last_step} at {status.progress.last_update_time}"


def _trains(status: FineTuneJobStatus, observation: Observation) -> bool | None:
    """Whether the attempt has begun to train, by the last report of rank 0; None if unknown.

    Without a report the last known state counts, because rank 0 may be the first rank to exit, and
    an operator that has just started has not received a report yet.
    """
    if observation.is_training is not None:
        return observation.is_training
    if (report := observation.progress) is not None:
        return report.phase not in _BEFORE_TRAINING
    if observation.unheard or is_unheard(status):
        return None
    return is_true(status, ConditionType.RUNNING)


def describe_stop(
    status: FineTuneJobStatus,
    attempt: AttemptStatus,
    observation: Observation,
    grace: float,
    *,
    saves: bool = True,
) -> str:
    """Return a clause that describes how the attempt stops.

    Args:
        status: Status of the job, with the conditions of the attempt.
        attempt: The open attempt.
        observation: Observation of the attempt.
        grace: Seconds after which the remaining processes are killed.
        saves: Whether the attempt saves checkpoints.
    """
    name = f"attempt {attempt.number}"
    killed = f"processes that still run after {grace:g} s are killed"
    trains = _trains(status, observation)
    if trains is not False:
        if _has_lost_a_node(observation):
            return f"{name} has lost a node and stops without another checkpoint; {killed}"
        if not saves:
            return f"{name} stops without a checkpoint (spec.checkpoint.enabled); {killed}"
        if trains is None:
            unheard = observation.unheard or "its progress could not be read"
            last = _last_report(attempt, status)
            return (
                f"{name} was asked to save a checkpoint and stop, and it is not known what it "
                f"saves: {unheard}; {last}; {killed}"
            )
        return f"{name} saves a checkpoint of its newest step and stops; {killed}"
    if not observation.nodes_ready:
        return f"{name} is stopped before it starts to train"
    return f"{name} has not trained yet and stops without a checkpoint; {killed}"


def _has_lost_a_node(observation: Observation) -> bool:
    termination = observation.termination
    if termination is None or observation.phase is not AttemptPhase.FAILED:
        return False
    return termination.exit_code not in _ORDERLY_EXITS

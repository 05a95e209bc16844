"""Say what an attempt does that was told to stop, until it is gone. Pure."""

from finetune_operator.api.v1alpha1.status import AttemptStatus, FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.backends.guilt import TOLD_TO_LEAVE
from finetune_operator.reconcile.conditions import ConditionType, is_true
from finetune_trainer.config import ExitCode, Phase

BEFORE_TRAINING = frozenset({Phase.STARTING, Phase.TOKENIZING, Phase.LOADING})
_IN_ORDER = frozenset({ExitCode.DONE, ExitCode.PREEMPTED, *TOLD_TO_LEAVE})


def trains(status: FineTuneJobStatus, observation: Observation) -> bool:
    """Say whether the attempt has begun to train, as far as rank 0 was heard.

    Who was seen to train is believed to while nothing is heard: rank 0 may be the first to end, and
    an operator that starts anew has asked nobody yet.
    """
    if (said := observation.progress) is not None:
        return said.phase not in BEFORE_TRAINING
    return is_true(status, ConditionType.RUNNING)


def on_its_way(
    status: FineTuneJobStatus, attempt: AttemptStatus, observation: Observation, grace: float
) -> str:
    """Return what the attempt does, as a part of a sentence.

    Args:
        status: The job's, with what was told of the attempt before.
        attempt: The open one.
        observation: Of it.
        grace: Seconds after which what is left of it is killed.
    """
    who, killed = f"attempt {attempt.number}", f"what is left of it after {grace:g} s is killed"
    if trains(status, observation):
        if _has_lost_a_node(observation):
            return f"{who} has lost a node and stops without another checkpoint; {killed}"
        return f"{who} saves a checkpoint of its newest step and stops; {killed}"
    if not observation.nodes_ready:
        return f"{who} is ended before it began to train"
    return f"{who} stops before it trains, as there is nothing to save; {killed}"


def _has_lost_a_node(observation: Observation) -> bool:
    words = observation.termination
    if words is None or observation.phase is not AttemptPhase.FAILED:
        return False
    return words.exit_code not in _IN_ORDER

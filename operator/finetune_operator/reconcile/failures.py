"""Why an attempt ended, and what the restart policy makes of it.

`decide` asks; nothing here knows time, backends or budgets (budgets: `attempts`).
"""

from finetune_operator.api.v1alpha1.lifecycle import RestartAction, RestartPolicy
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.backends.root_cause import STOPPED_BY_SIGNAL
from finetune_trainer.config import ExitCode, FailureClass, Termination

PERMANENT = frozenset(
    {
        FailureClass.DATA_ERROR,
        FailureClass.CONFIG_ERROR,
        FailureClass.DO_NOT_RESTART,
        FailureClass.OVERTAKEN,
    }
)
"""Classes that the same attempt would meet again."""

DISRUPTIONS = frozenset({FailureClass.PREEMPTED, FailureClass.SERVICE_FAILED})
"""Classes that are no fault of the job."""

_CLASS_OF_CODE: dict[int, FailureClass] = {
    ExitCode.DONE: FailureClass.COMPLETED,
    ExitCode.DATA: FailureClass.DATA_ERROR,
    ExitCode.PREEMPTED: FailureClass.PREEMPTED,
    ExitCode.CONFIG: FailureClass.CONFIG_ERROR,
    ExitCode.DO_NOT_RESTART: FailureClass.DO_NOT_RESTART,
}


def verdict(observation: Observation) -> Termination:
    """Return the termination of an attempt whose processes are all gone.

    The exit code beats the class that the message claims, and only the phase `Succeeded` together
    with exit code 0 is a completion. An attempt without a termination message was killed.
    """
    said = observation.termination
    if said is None and observation.phase is AttemptPhase.SUCCEEDED:
        return Termination(
            failure_class=FailureClass.COMPLETED,
            exit_code=ExitCode.DONE,
            message=observation.message or "it ended with exit code 0",
        )
    if said is None:
        message = observation.message or "its processes are gone without a termination message"
        found = observation.failure_class or FailureClass.WORKER_LOST
        return Termination(failure_class=found, exit_code=ExitCode.KILLED, message=message)
    if said.exit_code == ExitCode.DONE and observation.phase is not AttemptPhase.SUCCEEDED:
        return said.model_copy(update={"failure_class": FailureClass.ERROR, "exit_code": 1})
    return said.model_copy(update={"failure_class": classify(said)})


def classify(said: Termination) -> FailureClass:
    """Return the class by exit code where the code has one of its own, else the class it claims."""
    by_code = _CLASS_OF_CODE.get(said.exit_code)
    overtaken = FailureClass.OVERTAKEN
    if by_code is FailureClass.DO_NOT_RESTART and said.failure_class is overtaken:
        return overtaken  # the one class that shares a code
    if by_code is not None:
        return by_code
    if said.exit_code in STOPPED_BY_SIGNAL and said.failure_class is FailureClass.PREEMPTED:
        return FailureClass.PREEMPTED
    if said.failure_class in (*_CLASS_OF_CODE.values(), overtaken):
        killed = said.exit_code == ExitCode.KILLED
        return FailureClass.WORKER_LOST if killed else FailureClass.ERROR
    return said.failure_class


def action_for(policy: RestartPolicy, failure_class: FailureClass, exit_code: int) -> RestartAction:
    """Return what follows a failure: the first rule that matches, else the default of its class.

    By default bad data, a bad configuration and `DoNotRestart` fail the job, a disruption is
    followed by a free restart and everything else by a counted one. A rule of the user beats
    these, as it was written for this job; but what was overtaken is never restarted, as another
    attempt writes its folders by now.
    """
    if failure_class is FailureClass.OVERTAKEN:
        return RestartAction.FAIL
    for rule in policy.rules:
        class_fits = rule.on_class is None or rule.on_class == failure_class
        code_fits = rule.on_exit_codes is None or exit_code in rule.on_exit_codes
        if class_fits and code_fits:
            return rule.action
    if failure_class in PERMANENT:
        return RestartAction.FAIL
    if failure_class in DISRUPTIONS:
        return RestartAction.RESTART_FREE
    return RestartAction.RESTART

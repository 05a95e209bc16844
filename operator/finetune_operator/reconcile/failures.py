"""The failure class of an attempt, and the action of the restart policy.

`decide` calls it. The result does not depend on time, backends or restart budgets, which `attempts`
counts.
"""

from finetune_operator.api.v1alpha1.lifecycle import RestartAction, RestartPolicy
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.backends.root_cause import NO_EXIT_CODE, STOPPED_BY_SIGNAL
from finetune_trainer.config import ExitCode, FailureClass, Termination

PERMANENT_CLASSES = frozenset(
    {
        FailureClass.DATA_ERROR,
        FailureClass.CONFIG_ERROR,
        FailureClass.DO_NOT_RESTART,
        FailureClass.OVERTAKEN,
    }
)
"""Classes that would recur in the next attempt."""

_OF_BACKEND = frozenset(
    {
        FailureClass.SERVICE_FAILED,
        FailureClass.EVICTED,
        FailureClass.NODE_LOST,
        FailureClass.REJECTED,
        FailureClass.NOT_STARTED,
    }
)
"""Classes that only a backend reports, never a trainer."""

DISRUPTIONS = (_OF_BACKEND | {FailureClass.PREEMPTED}) - {FailureClass.EVICTED}
"""Classes that the job did not cause."""

_CLASS_OF_CODE: dict[int, FailureClass] = {
    ExitCode.DONE: FailureClass.COMPLETED,
    ExitCode.DATA: FailureClass.DATA_ERROR,
    ExitCode.PREEMPTED: FailureClass.PREEMPTED,
    ExitCode.CONFIG: FailureClass.CONFIG_ERROR,
    ExitCode.DO_NOT_RESTART: FailureClass.DO_NOT_RESTART,
}


_STOPPED = frozenset({NO_EXIT_CODE, ExitCode.PREEMPTED, ExitCode.KILLED, *STOPPED_BY_SIGNAL})


def verdict(observation: Observation, given_up: Termination | None = None) -> Termination:
    """Return the termination of an attempt whose processes are all gone.

    The class that the backend has decided takes precedence over the exit code, and the exit code
    over the class in the message. Only the phase `Succeeded` with exit code 0 is a completion. An
    attempt without a termination message or class was killed.

    Args:
        observation: The last observation of the attempt.
        given_up: The recorded termination if the operator has ended the attempt. A failure that
            the trainer reports itself takes precedence.
    """
    seen = _reported(observation)
    if given_up is None or seen.exit_code not in _STOPPED:
        return seen
    return given_up.model_copy(update={"progress": seen.progress})


def _reported(observation: Observation) -> Termination:
    reported = observation.termination
    if reported is None and observation.phase is AttemptPhase.SUCCEEDED:
        return Termination(
            failure_class=FailureClass.COMPLETED,
            exit_code=ExitCode.DONE,
            message=observation.message or "it ended with exit code 0",
        )
    if reported is None:
        message = observation.message or "its processes are gone without a termination message"
        found, code = observation.failure_class, NO_EXIT_CODE
        if found is None:
            found, code = FailureClass.WORKER_LOST, ExitCode.KILLED
        return Termination(failure_class=found, exit_code=code, message=message)
    if observation.failure_class is not None:
        return reported.model_copy(update={"failure_class": observation.failure_class})
    if reported.exit_code == ExitCode.DONE and observation.phase is not AttemptPhase.SUCCEEDED:
        return reported.model_copy(update={"failure_class": FailureClass.ERROR, "exit_code": 1})
    return reported.model_copy(update={"failure_class": class_of(reported)})


def class_of(reported: Termination) -> FailureClass:
    """Return the class of the exit code; for a code without a class, the reported class."""
    by_code = _CLASS_OF_CODE.get(reported.exit_code)
    overtaken = FailureClass.OVERTAKEN
    if by_code is FailureClass.DO_NOT_RESTART and reported.failure_class is overtaken:
        return overtaken  # it shares its code with DoNotRestart
    if by_code is not None:
        return by_code
    if reported.exit_code in STOPPED_BY_SIGNAL and reported.failure_class is FailureClass.PREEMPTED:
        return FailureClass.PREEMPTED
    if reported.failure_class in (*_CLASS_OF_CODE.values(), *_OF_BACKEND, overtaken):
        killed = reported.exit_code == ExitCode.KILLED
        return FailureClass.WORKER_LOST if killed else FailureClass.ERROR
    return reported.failure_class


def action_for(
    policy: RestartPolicy, failure_class: FailureClass, exit_code: int, *, recurs: bool = False
) -> RestartAction:
    """Return the action after a failure: of the first matching rule, else of its class.

    By default bad data, a bad configuration and `DoNotRestart` fail the job, a disruption causes a
    free restart, and any other class a counted restart. A rule of the user takes precedence,
    because it was written for this job. An overtaken attempt is never restarted, because another
    attempt writes its folders now. A restart after a class that would recur is always counted, also
    for a stored job with `RestartFree`, because it would restart indefinitely.

    Args:
        policy: Rules of the job.
        failure_class: Class of the failure.
        exit_code: Exit code of the attempt.
        recurs: Whether the next attempt would fail in the same way, whatever the class.
    """
    if failure_class is FailureClass.OVERTAKEN:
        return RestartAction.FAIL
    recurs = recurs or failure_class in PERMANENT_CLASSES
    for rule in policy.rules:
        matches_class = rule.on_class is None or rule.on_class == failure_class
        matches_code = rule.on_exit_codes is None or exit_code in rule.on_exit_codes
        if matches_class and matches_code:
            is_free = rule.action is RestartAction.RESTART_FREE
            return RestartAction.RESTART if is_free and recurs else rule.action
    if recurs:
        return RestartAction.FAIL
    if failure_class in DISRUPTIONS:
        return RestartAction.RESTART_FREE
    return RestartAction.RESTART

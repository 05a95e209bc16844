"""Which node's failure is the root cause of an attempt's end; a node that was stopped is none."""

import signal

from finetune_trainer.config import ExitCode, FailureClass, Termination

TERMINATED = 128 + signal.SIGTERM
STOPPED_BY_SIGNAL = frozenset({TERMINATED, 128 + signal.SIGINT})
"""Codes of a trainer that a signal ended before it could take it over: nothing was trained yet."""

_PERMANENT = frozenset({ExitCode.DATA, ExitCode.CONFIG, ExitCode.DO_NOT_RESTART})
_SECONDARY = frozenset({ExitCode.PREEMPTED, *STOPPED_BY_SIGNAL})


def stopped_by_signal(node: str, exit_code: int) -> Termination:
    """Return the termination of a node that a signal ended before it could write a message."""
    name = signal.Signals(exit_code - 128).name
    text = f"{node} was asked to stop ({name}) before it could save or say anything"
    return Termination(failure_class=FailureClass.PREEMPTED, exit_code=exit_code, message=text)


def with_seen_exit_code(node: str, said: Termination, exit_code: int) -> Termination:
    """Return a node's own termination message with the exit code that was seen from outside."""
    if said.exit_code == exit_code:
        return said
    is_completed = said.failure_class is FailureClass.COMPLETED
    changed = {
        "exit_code": exit_code,
        "failure_class": FailureClass.ERROR if is_completed else said.failure_class,
        "message": f"{node} ended with exit code {exit_code} after it said: {said.message}",
    }
    return said.model_copy(update=changed)


def root_cause_order(exit_code: int, *, is_victim: bool) -> int:
    """Return a node's place in the search for the root cause; the lowest one is it.

    First those that failed for good and say why, then those that were killed and could not. Nodes
    that were stopped, and those that were ended with the rest (`is_victim`), explain nothing.
    """
    if is_victim:
        return 4
    if exit_code in _PERMANENT:
        return 0
    if exit_code == ExitCode.KILLED:
        return 1
    if exit_code in _SECONDARY:
        return 3
    return 5 if exit_code == ExitCode.DONE else 2

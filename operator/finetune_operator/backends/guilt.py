"""Whose end explains the ends of the others, and which ends are no fault: it was told to leave."""

import signal

from finetune_trainer.config import ExitCode, FailureClass, Termination

TERMINATED = 128 + signal.SIGTERM
TOLD_TO_LEAVE = frozenset({TERMINATED, 128 + signal.SIGINT})
"""Codes of a trainer that a signal ended before it could take it over: nothing was trained yet."""

_PERMANENT = frozenset({ExitCode.DATA, ExitCode.CONFIG, ExitCode.DO_NOT_RESTART})
_SECONDARY = frozenset({ExitCode.PREEMPTED, *TOLD_TO_LEAVE})


def told_to_leave(node: str, exit_code: int) -> Termination:
    """Return the words for a node that a signal ended before it could say any."""
    name = signal.Signals(exit_code - 128).name
    text = f"{node} was told to stop ({name}) before it could save or say anything"
    return Termination(failure_class=FailureClass.PREEMPTED, exit_code=exit_code, message=text)


def innocence(exit_code: int, *, is_victim: bool) -> int:
    """Return how little a node's end explains; the guilty one has the least.

    A node that failed for good says why; one that was killed could not. Those that were told to
    leave, and those that were ended with the rest (`is_victim`), explain nothing.
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

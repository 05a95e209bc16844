"""Whose end explains the ends of the others, when the nodes of a gang have ended differently."""

import signal

from finetune_trainer.config import ExitCode

TERMINATED = 128 + signal.SIGTERM
_PERMANENT = frozenset({ExitCode.DATA, ExitCode.CONFIG, ExitCode.DO_NOT_RESTART})
_SECONDARY = frozenset({ExitCode.PREEMPTED, TERMINATED})


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

"""Find the node whose failure is the root cause of an attempt's end."""

import signal
from collections.abc import Mapping

from finetune_trainer.config import ExitCode, FailureClass, Termination

TERMINATED = 128 + signal.SIGTERM
STOPPED_BY_SIGNAL = frozenset({TERMINATED, 128 + signal.SIGINT})
"""Exit codes of a trainer that a signal ended before it handled signals, and so before its first
step.
"""

PERMANENT_CODES = frozenset({ExitCode.DATA, ExitCode.CONFIG, ExitCode.DO_NOT_RESTART})
"""Exit codes of a trainer whose failure would repeat."""

NO_EXIT_CODE = -1
"""Exit code of a termination for which no process gave one; the status has none then."""

_SECONDARY = frozenset({ExitCode.PREEMPTED, *STOPPED_BY_SIGNAL})


def stopped_by_signal(node: str, exit_code: int) -> Termination:
    """Return the termination of a node that a signal ended before it could write a message."""
    name = signal.Signals(exit_code - 128).name
    text = f"{node} was asked to stop ({name}) before it could save or report"
    return Termination(failure_class=FailureClass.PREEMPTED, exit_code=exit_code, message=text)


def ended_silently(node: str, exit_code: int, *, reason: str = "", more: str = "") -> Termination:
    """Return the termination of a node that ended without a message.

    Args:
        node: Name of the node for messages.
        exit_code: Exit code of its main process.
        reason: Addition to the code, such as ` (Reason)`.
        more: End of the sentence.
    """
    if exit_code in STOPPED_BY_SIGNAL:
        return stopped_by_signal(node, exit_code)
    failure, text = FailureClass.ERROR, f"{node} ended with exit code {exit_code}{reason}"
    if exit_code == ExitCode.DONE:
        failure, more = FailureClass.COMPLETED, ""
    elif exit_code == ExitCode.KILLED:
        failure, text, more = FailureClass.WORKER_LOST, f"{node} was killed (SIGKILL)", ""
    message = f"{text} without a termination message{more}"
    return Termination(failure_class=failure, exit_code=exit_code, message=message)


def with_seen_exit_code(node: str, termination: Termination, exit_code: int) -> Termination:
    """Return a node's own termination message with the exit code that was observed from outside.

    An observed 0 does not overrule a failure that the trainer reports, because a shell as in
    `trainer | tee log` exits with the code of its last command.
    """
    if termination.exit_code == exit_code:
        return termination
    if exit_code == ExitCode.DONE:
        hidden = f"{termination.message} ({node} ended with exit code 0 nevertheless)"
        return termination.model_copy(update={"message": hidden})
    is_completed = termination.failure_class is FailureClass.COMPLETED
    changed = {
        "exit_code": exit_code,
        "failure_class": FailureClass.ERROR if is_completed else termination.failure_class,
        "message": (
            f"{node} ended with exit code {exit_code} after its message: {termination.message}"
        ),
    }
    return termination.model_copy(update=changed)


def root_cause_order(exit_code: int, *, is_victim: bool) -> int:
    """Return a node's rank in the search for the root cause; the lowest is the root cause.

    Permanent failures with a message come first, then killed nodes without one. Nodes that were
    stopped, or ended with the others (`is_victim`), are never the root cause.
    """
    if is_victim:
        return 4
    if exit_code in PERMANENT_CODES:
        return 0
    if exit_code == ExitCode.KILLED:
        return 1
    if exit_code in _SECONDARY:
        return 3
    return 5 if exit_code == ExitCode.DONE else 2


def root_cause(terminations: Mapping[int, Termination]) -> int | None:
    """Return the node whose failure is the root cause, or None if no node has failed.

    Nodes that only noticed the loss of others follow nodes that failed in the same way.
    """

    def order(node: int) -> tuple[int, bool, int]:
        one = terminations[node]
        has_lost_others = one.failure_class is FailureClass.WORKER_LOST
        return root_cause_order(one.exit_code, is_victim=False), has_lost_others, node

    return min(terminations, key=order, default=None)

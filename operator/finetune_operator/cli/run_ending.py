"""End what an earlier run has left running, wherever that is, before `--fresh` starts anew.

A new job has another uid, by which nobody finds the attempt of the old one any more.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends import registry
from finetune_operator.backends.base import BackendContext
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.cli.run_operator import POLL_SECONDS, Operator
from finetune_operator.cli.stop_signals import StopSignals
from finetune_operator.cli.view import duration
from finetune_operator.errors import FineTuneError
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import ConditionType, Reason, find, is_true

_GRACE_SECONDS = 1  # the least that the API takes
_UNREACHABLE = frozenset({Reason.BACKEND_FAILED, Reason.BACKEND_NOT_FOUND})


class NotEndedError(FineTuneError):
    """The end of the attempt is not confirmed, so nothing may take its place."""


class LeftRunningError(FineTuneError):
    """The user did not wait for the end of the attempt."""


async def end_attempt(
    job: FineTuneJob,
    folder: RunFolder,
    context: BackendContext,
    *,
    command: Sequence[str],
    stop: StopSignals,
    say: Callable[[str], None],
) -> None:
    """End the open attempt of `job` with the least grace, and wait until nothing of it lives.

    The job is suspended for that: the next run of it goes on, whatever comes of this.

    Args:
        job: As it was saved last.
        folder: Its run directory, locked by the caller.
        context: What its backend is given.
        command: What a node runs.
        stop: Once asked for, nobody waits any longer.
        say: Tells the user one line.

    Raises:
        NotEndedError: it cannot be told to stop, or its end takes longer than its backend's bound.
        LeftRunningError: the user has asked for a stop.
        RunFolderError: the job's status cannot be saved.
    """
    bound = registry.load(job.spec.backend.type).limits.unconfirmed_cancel
    clock = asyncio.get_running_loop().time
    told_at: float | None = None
    say(f"ending {_attempt_of(job)} first; Ctrl-C leaves it")
    async with aclosing(Operator(_suspended(job), folder, context, command)) as operator:
        while not _has_ended(job := await operator.read()):
            if stop.asked.is_set():
                raise LeftRunningError(
                    f"left {_attempt_of(job)} as it is; it may have been told to stop by now, and "
                    "no new run was started"
                )
            if (reason := _hindrance(job)) is not None:
                raise NotEndedError(_refusal(job, folder, reason))
            if told_at is None and _is_acted_on(job):
                told_at = clock()
            waited = 0.0 if told_at is None else clock() - told_at
            if bound is not None and waited > _GRACE_SECONDS + bound:
                reason = f"it has not ended within {duration(waited)}"
                raise NotEndedError(_refusal(job, folder, reason))
            await asyncio.sleep(POLL_SECONDS)


def _suspended(job: FineTuneJob) -> FineTuneJob:
    """Return the job in a new generation, so that its status says when this one is acted on."""
    limits = job.spec.deadlines.model_copy(update={"termination_grace_seconds": _GRACE_SECONDS})
    spec = job.spec.model_copy(update={"suspend": True, "deadlines": limits})
    metadata = job.metadata.model_copy(update={"generation": job.metadata.generation + 1})
    return job.model_copy(update={"metadata": metadata, "spec": spec})


def _is_acted_on(job: FineTuneJob) -> bool:
    return job.status.observed_generation >= job.metadata.generation


def _has_ended(job: FineTuneJob) -> bool:
    """Say whether nothing of the attempt lives; one that was never created stays open."""
    if attempts.current(job.status) is None:
        return True
    return _is_acted_on(job) and is_true(job.status, ConditionType.SUSPENDED)


def _hindrance(job: FineTuneJob) -> str | None:
    """Return why the attempt cannot be ended; what its service says of it may pass meanwhile."""
    found = find(job.status, ConditionType.STALLED)
    if not _is_acted_on(job) or found is None or found.status != "True":
        return None
    is_lasting = found.reason in _UNREACHABLE or handle_of(job.status) is None
    return found.message if is_lasting else None


def _attempt_of(job: FineTuneJob) -> str:
    handle = handle_of(job.status)
    where = f"({handle.url or handle.name})" if handle else "(its creation had no answer yet)"
    return f"attempt {job.status.attempt} of the earlier run {where}"


def _refusal(job: FineTuneJob, folder: RunFolder, reason: str) -> str:
    return (
        f"--fresh starts no new run while {_attempt_of(job)} may run: {reason}; end it there and "
        f"run this again, or, once nothing of it runs, move {folder.run_dir} away and leave out "
        "--fresh"
    )

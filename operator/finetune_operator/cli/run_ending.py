"""End the running attempt of an earlier run, on any backend, before `--fresh` starts a new job.

The new job has another uid, with which the attempt of the old job could no longer be found.
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

_GRACE_SECONDS = 1  # the minimum of the API
_UNREACHABLE = frozenset({Reason.BACKEND_FAILED, Reason.BACKEND_NOT_FOUND})


class NotEndedError(FineTuneError):
    """The end of the attempt is not confirmed, so no new attempt may start."""


class LeftRunningError(FineTuneError):
    """The user did not wait for the end of the attempt."""


async def end_attempt(
    job: FineTuneJob,
    folder: RunFolder,
    context: BackendContext,
    *,
    command: Sequence[str],
    stop: StopSignals,
    report: Callable[[str], None],
) -> None:
    """End the open attempt of `job` with the shortest grace, and wait for its processes to end.

    The job is suspended for this; if ending it fails, the next run without --fresh resumes it.

    Args:
        job: The job as last saved.
        folder: Run directory of the job, locked by the caller.
        context: Context of the backend.
        command: Command of a node.
        stop: Stop requests of the user; the first ends the wait.
        report: Prints one line for the user.

    Raises:
        NotEndedError: the attempt cannot be stopped, or takes longer than its backend's bound.
        LeftRunningError: the user has requested a stop.
        RunFolderError: the job's status cannot be saved.
    """
    bound = registry.load(job.spec.backend.type).limits.unconfirmed_cancel
    clock = asyncio.get_running_loop().time
    requested_at: float | None = None
    report(f"ending {_described(job)} first; Ctrl-C leaves it")
    async with aclosing(Operator(_suspended(job), folder, context, command)) as operator:
        while not _has_ended(job := await operator.read()):
            if stop.asked.is_set():
                raise LeftRunningError(
                    f"left {_described(job)} as it is; a stop may have been requested, and "
                    "no new run was started"
                )
            if (reason := _blocking_reason(job)) is not None:
                raise NotEndedError(_refusal(job, folder, reason))
            if requested_at is None and _is_observed(job):
                requested_at = clock()
            waited = 0.0 if requested_at is None else clock() - requested_at
            if bound is not None and waited > _GRACE_SECONDS + bound:
                reason = f"it has not ended within {duration(waited)}"
                raise NotEndedError(_refusal(job, folder, reason))
            await asyncio.sleep(POLL_SECONDS)


def _suspended(job: FineTuneJob) -> FineTuneJob:
    """Return the job suspended, in a new generation that its status acknowledges when observed."""
    limits = job.spec.deadlines.model_copy(update={"termination_grace_seconds": _GRACE_SECONDS})
    spec = job.spec.model_copy(update={"suspend": True, "deadlines": limits})
    metadata = job.metadata.model_copy(update={"generation": job.metadata.generation + 1})
    return job.model_copy(update={"metadata": metadata, "spec": spec})


def _is_observed(job: FineTuneJob) -> bool:
    return job.status.observed_generation >= job.metadata.generation


def _has_ended(job: FineTuneJob) -> bool:
    """Whether all processes have ended; an attempt that was never created stays open."""
    if attempts.current(job.status) is None:
        return True
    return _is_observed(job) and is_true(job.status, ConditionType.SUSPENDED)


def _blocking_reason(job: FineTuneJob) -> str | None:
    """Return why the attempt cannot be ended; None if there is no reason or it may be temporary."""
    found = find(job.status, ConditionType.STALLED)
    if not _is_observed(job) or found is None or found.status != "True":
        return None
    is_lasting = found.reason in _UNREACHABLE or handle_of(job.status) is None
    return found.message if is_lasting else None


def _described(job: FineTuneJob) -> str:
    handle = handle_of(job.status)
    where = f"({handle.url or handle.name})" if handle else "(its creation has no response yet)"
    return f"attempt {job.status.attempt} of the earlier run {where}"


def _refusal(job: FineTuneJob, folder: RunFolder, reason: str) -> str:
    return (
        f"--fresh starts no new run while {_described(job)} may run: {reason}; end it there and "
        f"run this again, or, once it has ended, move {folder.run_dir} away and leave out "
        "--fresh"
    )

"""Decide whether a manifest resumes the job of its run directory or starts a new one.

`ftctl run` calls it before `follow`: the same job is resumed, or the old run is moved aside and a
new job starts. Two attempts never write the same folder.
"""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from finetune_operator.api.problems import InvalidJobError, Problem, raise_errors
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneJobSpec, FineTuneJobStatus
from finetune_operator.api.v1alpha1.transitions import changes_of_training, changes_that_suspend
from finetune_operator.api.validation import check_start
from finetune_operator.backends import registry
from finetune_operator.backends.base import BackendContext
from finetune_operator.backends.local.backend import TRAINER
from finetune_operator.backends.local.run_folder import RunFolder, RunFolderError
from finetune_operator.cli.run_ending import end_attempt
from finetune_operator.cli.stop_signals import StopSignals
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import ConditionType, is_true

_UNNAMED = ("auto", "none")


@dataclass(frozen=True)
class OpenedJob:
    """A job ready to be followed.

    Attributes:
        job: The job with its uid and status; already saved.
        note: One sentence for the user about an earlier run; empty for a new job.
        then: The spec to set once the job is suspended; None keeps the spec.
    """

    job: FineTuneJob
    note: str = ""
    then: FineTuneJobSpec | None = None


async def open_job(
    manifest: FineTuneJob,
    folder: RunFolder,
    context: BackendContext,
    *,
    stop: StopSignals,
    report: Callable[[str], None],
    fresh: bool = False,
    command: Sequence[str] = TRAINER,
) -> OpenedJob:
    """Return the job to run for `manifest`, saved in `folder`.

    An empty folder gets a new job. An unfinished, suspended or failed job is resumed from its
    newest committed checkpoint. A Complete run is moved aside and a new job starts. `fresh` starts
    a new job in every case, after it has ended a running attempt.

    Args:
        manifest: The job in the manifest.
        folder: Run directory of the job, locked by the caller.
        context: Context of the backend.
        stop: Stop requests of the user, which end the wait for the end of an attempt.
        report: Prints one line for the user about that wait.
        fresh: Whether to start a new job.
        command: Command of a node.

    Raises:
        InvalidJobError: the manifest changes the training of the unfinished run, or no job can
            start with it.
        RunFolderError: the run directory holds another job, or cannot be read.
        NotEndedError: the end of the running attempt is not confirmed.
        LeftRunningError: the user did not wait for that end.
    """
    if fresh:
        raise_errors(check_start(manifest))
        end = partial(end_attempt, command=command, stop=stop, report=report)
        opened = _new(manifest, await _make_way(manifest, folder, context, end))
    else:
        opened = _opened(manifest, folder)
    folder.save(opened.job)
    return opened


async def _make_way(
    manifest: FineTuneJob,
    folder: RunFolder,
    context: BackendContext,
    end: Callable[[FineTuneJob, RunFolder, BackendContext], Awaitable[None]],
) -> str:
    """Move an earlier run aside, and return the sentence for the user.

    The attempt is ended first: it can no longer be found once its job has been moved.
    """
    try:
        stored = folder.load()
    except RunFolderError:
        unknown = "" if _is_here(manifest) else "; an attempt that runs elsewhere continues there"
        return _moved_aside(folder, manifest) + unknown
    if stored is None:
        return _moved_aside(folder, manifest) if folder.outside() else ""
    if attempts.current(stored.status) is not None:
        await end(stored, folder, context)
    return _moved_aside(folder, manifest)


def _opened(manifest: FineTuneJob, folder: RunFolder) -> OpenedJob:
    stored = folder.load()
    if stored is None:
        raise_errors(check_start(manifest))
        return _new(manifest, "")
    old, new = (f"{one.metadata.namespace}/{one.metadata.name}" for one in (stored, manifest))
    if old != new:
        raise RunFolderError(
            f"{folder.run_dir} holds the job {old}, not {new}; set another "
            "spec.backend.local.runDirectory, or move the old run aside with --fresh"
        )
    if not is_true(stored.status, ConditionType.COMPLETE):
        return _resume(stored, manifest, folder)
    raise_errors(check_start(manifest))
    if manifest.spec.take_over:
        folder.make_way()
        note = "the earlier run is complete; continuing with its files (spec.takeOver)"
        return _new(manifest, note)
    aside = folder.move_aside(manifest.metadata)
    return _new(manifest, f"the earlier run is complete; moved it to {aside}")


def _moved_aside(folder: RunFolder, manifest: FineTuneJob) -> str:
    return f"moved the old run to {folder.move_aside(manifest.metadata)}"


def _new(manifest: FineTuneJob, note: str) -> OpenedJob:
    metadata = manifest.metadata.model_copy(update={"uid": str(uuid.uuid4()), "generation": 1})
    new = {"metadata": metadata, "status": FineTuneJobStatus()}
    return OpenedJob(manifest.model_copy(update=new), note)


def _resume(stored: FineTuneJob, manifest: FineTuneJob, folder: RunFolder) -> OpenedJob:
    is_here = _is_here(manifest)
    status, newest = stored.status, folder.newest_step() if is_here else None
    if not status.attempt:
        raise_errors(check_start(manifest))
    is_open = attempts.current(status) is not None
    is_bound = is_open or newest is not None or status.checkpoint.last is not None
    if is_bound and (changed := changes_of_training(stored.spec, manifest.spec)):
        message = (
            f"differs from the unfinished run in {folder.run_dir} ({', '.join(changed)}); restore "
            "the old values to resume, or start a new run with --fresh, which moves that run aside"
        )
        raise InvalidJobError([Problem(f"spec.{changed[0]}", message)])
    metadata = stored.metadata.model_copy(update=manifest.metadata.model_extra)  # such as labels
    stored = stored.model_copy(update={"metadata": metadata})
    if is_true(status, ConditionType.FAILED):
        stored = stored.model_copy(update={"status": attempts.reopen(status, datetime.now(UTC))})
    if is_open and (changed := changes_that_suspend(stored.spec, manifest.spec)):
        spec = stored.spec.model_copy(update={"suspend": True})
        note = (
            f"attempt {status.attempt} runs with another {', '.join(changed)}; it is stopped "
            f"{_how_stopped(stored)} first, because that changes only while it is suspended"
        )
        return OpenedJob(_with_spec(stored, spec), note, manifest.spec)
    job = _with_spec(stored, manifest.spec)
    if not is_open:
        start = _start_here(job, newest) if is_here else _start_elsewhere(job)
        return OpenedJob(job, _note(job, start))
    is_late = stored.spec != manifest.spec
    late = "; changes of the manifest take effect with the next attempt" if is_late else ""
    return OpenedJob(job, f"attempt {status.attempt} has not ended; following it{late}")


def _how_stopped(job: FineTuneJob) -> str:
    if job.spec.checkpoint.enabled is False:
        return "without a checkpoint (spec.checkpoint.enabled)"
    return "with a checkpoint"


def _is_here(job: FineTuneJob) -> bool:
    return registry.load(job.spec.backend.type).runs_on_this_machine


def _with_spec(job: FineTuneJob, spec: FineTuneJobSpec) -> FineTuneJob:
    """Return the job in a new generation, even if the spec is equal: a fault may be fixed."""
    metadata = job.metadata.model_copy(update={"generation": job.metadata.generation + 1})
    return job.model_copy(update={"metadata": metadata, "spec": spec})


def _note(job: FineTuneJob, start: str) -> str:
    if not job.status.attempt:
        return "resuming the job of the earlier run"
    return f"resuming with attempt {job.status.attempt + 1}, {start}"


def _start_here(job: FineTuneJob, newest: int | None) -> str:
    """Describe the start by the checkpoint folder; the status may name a deleted checkpoint."""
    if newest is not None:
        return f"from the checkpoint of step {newest}"
    named = job.spec.checkpoint.resume_from
    return "from the first step: there is no checkpoint" if named in _UNNAMED else f"from {named}"


def _start_elsewhere(job: FineTuneJob) -> str:
    """Describe the start by the status, because the checkpoints are not on this machine."""
    if (last := job.status.checkpoint.last) is not None:
        return f"from the checkpoint of step {last.step}"
    named = job.spec.checkpoint.resume_from
    first = "the first step" if named in _UNNAMED else named
    return f"from its newest checkpoint, or from {first} if there is none"

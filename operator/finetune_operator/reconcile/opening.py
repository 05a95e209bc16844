"""Decide what running a manifest means where a run directory exists already.

Called by `ftctl run` before `drive`: the same job goes on, or an old one is moved aside and a new
one starts. It never lets two attempts write one folder.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from finetune_operator.api.problems import InvalidJobError, Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.api.v1alpha1.transitions import changes_of_training
from finetune_operator.api.validate import check_start
from finetune_operator.backends.base import Backend
from finetune_operator.backends.local.run_folder import RunFolder, RunFolderError
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import ConditionType, is_true
from finetune_operator.reconcile.drive import SYSTEM_CLOCK, Clock, StopRequest, drive


@dataclass(frozen=True)
class OpenedJob:
    """A job ready to be driven.

    Attributes:
        job: With its uid and its status so far; already saved.
        note: One sentence for the user about what happens to an earlier run; empty for a new job.
    """

    job: FineTuneJob
    note: str


async def open_job(
    manifest: FineTuneJob,
    backend: Backend,
    store: RunFolder,
    *,
    fresh: bool = False,
    clock: Clock = SYSTEM_CLOCK,
    new_uid: Callable[[], str] = lambda: str(uuid.uuid4()),
) -> OpenedJob:
    """Return the job that running `manifest` means, saved in `store`.

    Nothing there: a new job. Unfinished, suspended or failed: the same job goes on, from its newest
    committed checkpoint. Complete: the old run is moved aside and a new job starts; `fresh` does
    that whatever the old run is, and ends first what still runs of it.

    Raises:
        InvalidJobError: the manifest asks for another training than the unfinished run's, or no
            job can begin with it.
        RunFolderError: the run directory holds another job, or cannot be read.
    """
    if fresh:
        _refuse_start(manifest)
    try:
        stored = store.load()
    except RunFolderError:
        if not fresh:
            raise
        return _new(manifest, store, new_uid, _moved_aside(store, manifest))
    if stored is None:
        _refuse_start(manifest)
        note = ""
        if fresh and store.outside():
            note = _moved_aside(store, manifest)
        return _new(manifest, store, new_uid, note)
    if fresh:
        await _end(stored, backend, store, clock)
        return _new(manifest, store, new_uid, _moved_aside(store, manifest))
    _refuse_another_job(stored, manifest, store)
    if is_true(stored.status, ConditionType.COMPLETE):
        _refuse_start(manifest)
        note = f"the earlier run is complete; moved it to {store.move_aside(manifest.metadata)}"
        return _new(manifest, store, new_uid, note)
    return _go_on(stored, manifest, store, clock)


def _new(
    manifest: FineTuneJob, store: RunFolder, new_uid: Callable[[], str], note: str
) -> OpenedJob:
    metadata = manifest.metadata.model_copy(update={"uid": new_uid(), "generation": 1})
    job = manifest.model_copy(update={"metadata": metadata, "status": FineTuneJobStatus()})
    store.save(job)
    return OpenedJob(job, note)


def _moved_aside(store: RunFolder, manifest: FineTuneJob) -> str:
    return f"moved the old run to {store.move_aside(manifest.metadata)}"


async def _end(job: FineTuneJob, backend: Backend, store: RunFolder, clock: Clock) -> None:
    """Kill what still runs of an old run, so that it cannot write into the new one."""
    if attempts.current(job.status) is None:
        return
    stop = StopRequest()
    stop.force()
    await drive(job, backend, store, on_change=lambda job, seen: None, stop=stop, clock=clock)


def _refuse_start(manifest: FineTuneJob) -> None:
    problems = check_start(manifest)
    if problems:
        raise InvalidJobError(problems)


def _refuse_another_job(stored: FineTuneJob, manifest: FineTuneJob, store: RunFolder) -> None:
    old = (stored.metadata.namespace, stored.metadata.name)
    new = (manifest.metadata.namespace, manifest.metadata.name)
    if old != new:
        raise RunFolderError(
            f"{store.run_dir} holds the job {'/'.join(old)}, not {'/'.join(new)}; set another "
            "spec.backend.local.runDirectory, or move the old run aside with --fresh"
        )


def _go_on(stored: FineTuneJob, manifest: FineTuneJob, store: RunFolder, clock: Clock) -> OpenedJob:
    status = stored.status
    if not status.attempt:
        _refuse_start(manifest)
    lives = attempts.current(status) is not None
    changed = changes_of_training(stored.spec, manifest.spec)
    if changed and (lives or status.checkpoint.last is not None or store.newest_step() is not None):
        names = ", ".join(changed)
        message = (
            f"differs from the unfinished run in {store.run_dir} ({names}); restore the old "
            "values to go on, or start anew with --fresh, which moves that run aside"
        )
        raise InvalidJobError([Problem(f"spec.{changed[0]}", message)])
    if is_true(status, ConditionType.FAILED):
        status = attempts.reopen(status, clock.now())
    generation = stored.metadata.generation + (stored.spec != manifest.spec)
    metadata = manifest.metadata.model_copy(
        update={"uid": stored.metadata.uid, "generation": generation}
    )
    job = manifest.model_copy(update={"metadata": metadata, "status": status})
    store.save(job)
    if lives:
        return OpenedJob(job, _note_of_living(job, generation != stored.metadata.generation))
    return OpenedJob(job, _note(job, store.newest_step()))


def _note_of_living(job: FineTuneJob, is_changed: bool) -> str:
    late = "; changes of the manifest take effect with the next attempt" if is_changed else ""
    return f"attempt {job.status.attempt} is not over; going on with it{late}"


def _note(job: FineTuneJob, newest: int | None) -> str:
    """Promise what the checkpoint folder holds; the status may tell of one that is gone."""
    if not job.status.attempt:
        return "going on with the job that was opened before"
    named = job.spec.checkpoint.resume_from
    if newest is not None:
        start = f"from the checkpoint of step {newest}"
    elif named in ("auto", "none"):
        start = "from the first step, as there is no checkpoint"
    else:
        start = f"from {named}"
    return f"going on with attempt {job.status.attempt + 1}, {start}"

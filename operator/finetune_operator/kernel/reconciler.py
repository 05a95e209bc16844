"""Reconcile one job: observe, decide, act, and write the status if it says more than before.

Called by the workers, for one key at a time. Nothing here waits for anything to happen, and nothing
is kept that could not be found again: after a crash at any point the next look goes on.

What makes that safe: an attempt's children have names that follow from the job and the attempt's
number, so creating them again adopts them; a later attempt is opened in the status before anything
of it is created, and the first one is found by its name where the status does not tell of it yet;
whatever else the status lacks is seen again and written later.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneJobStatus
from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.backends.base import Attempt, Backend, Handle, Observation
from finetune_operator.errors import BackendError, FineTuneError
from finetune_operator.kernel import refusals
from finetune_operator.kernel.events import EventPoster, events_between, warning
from finetune_operator.kernel.folders import FolderBook, RivalsFirstError
from finetune_operator.kernel.jobs import Backends, JobBook, KnownJob, fault_of
from finetune_operator.kernel.look import AT_ONCE, NEVER, Look, look_in
from finetune_operator.kernel.observer import (
    LOOK_AGAIN_SECONDS,
    Observer,
    is_or_was_suspended,
)
from finetune_operator.kernel.reports import NO_DELAY, Delay, Reports
from finetune_operator.kernel.unwritten import Unwritten
from finetune_operator.kernel.watches import Refused, trim_metadata
from finetune_operator.kernel.writes import is_worth_writing, status_patch
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.errors import ConflictError, NotFoundError
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object
from finetune_operator.planner.plan import Plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import (
    ConditionType,
    is_finished,
    is_true,
    parse_rfc3339,
)
from finetune_operator.reconcile.creation import block, delay, give_up
from finetune_operator.reconcile.decide import (
    MENDED_SECONDS,
    Cancel,
    Collect,
    Decision,
    Refusal,
    Submit,
    as_opened,
    decide,
    hold,
)
from finetune_operator.reconcile.deleting import FOREGROUND, ORPHAN, decide_deletion

log = logging.getLogger(__name__)

FIRST_LOOK_SECONDS = 1.5
"""How long after an attempt was created it is looked at, unless something is seen of it before."""

_MAX_ARTIFACTS = 16
_REFUSED_SECONDS = 30.0  # an API server that starts may refuse for a moment what it allows then


class Reconciler:
    """Reconciles jobs of one cluster.

    Args:
        client: For status, finalizers and deletions of jobs; children are the backends' part.
        cache: The FineTuneJobs; answers to writes are put into it.
        backends: Who runs attempts.
        events: Who tells people.
        now: The time, with a zone.
        lacks: What keeps the attempts of a backend in a namespace from being seen; by their names.
        is_busy: Whether other jobs are to be looked at, which comes before reporting.
        wake: Has a job looked at, as it may have got what it was refused.
    """

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        backends: Backends,
        events: EventPoster,
        *,
        now: Callable[[], datetime],
        lacks: Callable[[str, str], Refused | None] = lambda namespace, backend: None,
        is_busy: Callable[[], bool] = lambda: False,
        wake: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self._client = client
        self._cache = cache
        self._backends = backends
        self._events = events
        self._now = now
        self._lacks = lacks
        self._is_busy = is_busy
        self._book = JobBook(cache.get, backends)
        self._unwritten = Unwritten()
        self._folders = FolderBook(cache, self._book.get, backends, self._unwritten, wake)
        self._reports = Reports()
        self._observer = Observer(backends, now)

    def is_new(self, key: Key) -> bool:
        """Say whether the job waits for its first look: nothing was told about it, or opened."""
        made = self._cache.get(key)
        if made is None or key in self._unwritten:
            return False
        return not (made.get("status") or {}).get("observedGeneration")

    async def reconcile(self, key: Key) -> Look:
        """Look at one job and do what is to be done.

        Raises:
            FineTuneError: try again later.
        """
        self._folders.catch_up()
        known = self._book.get(key)
        if known is None:
            if await self._folders.is_written_still(key):
                return Look(MENDED_SECONDS)  # or when its pods go
            self._forget(key)
            return NEVER
        if not known.is_ours:
            return NEVER
        try:
            if (lacks := self._lacks(key.namespace, known.backend)) is not None:
                return await self._stand_by(key, known, lacks)
            if known.is_deleted:
                return await self._finalize(key, known)
            if known.refusal is not None:
                return await self._hold(key, known, known.refusal)
            assert known.job is not None, "a job that is not refused can be read"
            return await self._look(key, known, await self._as_it_is(key, known, known.job))
        except _StaleError:
            await self._read_again(key)
            return AT_ONCE
        except RivalsFirstError:
            return Look(LOOK_AGAIN_SECONDS)
        finally:
            self._folders.settle(key)

    async def _look(self, key: Key, known: KnownJob, job: FineTuneJob) -> Look:
        try:
            observation = await self._observer.observe(key, job)
        except Exception as error:
            if isinstance(error, FineTuneError) and error.retryable:
                raise
            return await self._hold(key, known, refusals.unreadable(job, error), "that is mended")
        if observation is not None and observation.warning:
            await self._events.post(known.metadata, warning(observation.warning))
        decision = decide(job, observation, self._now(), self._plan(known, job, observation))
        submits = next((one for one in decision.actions if isinstance(one, Submit)), None)
        opened = attempts.current(job.status)
        is_resumed = is_true(job.status, ConditionType.SUSPENDED)
        if submits and opened and opened.number == submits.number and not is_resumed:
            # The status has this attempt already, so nothing new is said before it exists.
            return await self._submit_again(key, known, job, submits.number)
        if submits is not None:
            # Before anybody else is looked at.
            decision = replace(decision, status=self._folders.opened(key, decision.status))
            known = await self._with_finalizer(key, known, job)
        status = await self._collected(job, decision)
        known, delay = await self._report(key, known, status)
        if submits is not None:
            job = job.model_copy(update={"status": status})
            return await self._submit(key, known, job, submits.number)
        if await self._cancel(job, decision):
            return AT_ONCE
        if is_finished(status) and attempts.current(status) is None:
            self._forget(key)
            return await self._clean_up(key, known, job.spec.ttl_seconds_after_finished)
        waits = (decision.requeue_seconds, delay.seconds or None)
        again = min((one for one in waits if one is not None), default=None)
        return look_in(again, when_quiet=delay.until_quiet)

    def _plan(
        self, known: KnownJob, job: FineTuneJob, observation: Observation | None
    ) -> Plan | Refusal:
        """Judge a job only where an attempt may be opened: one that is open is left alone."""
        is_open = attempts.current(job.status) is not None
        if is_finished(job.status) or (is_open and not (observation and observation.all_gone)):
            return self._book.plan(job)
        judged = self._book.judge(known)
        if isinstance(judged, Refusal) or job.spec.suspend:
            return judged
        return self._folders.refusal(Key(job.metadata.namespace, job.metadata.name)) or judged

    async def _collected(self, job: FineTuneJob, decision: Decision) -> FineTuneJobStatus:
        """Ask what was exported before Complete is written: after a crash it is asked again."""
        handle = handle_of(job.status)
        if handle is None or not any(isinstance(one, Collect) for one in decision.actions):
            return decision.status
        artifacts = list(await self._backend(job).collect(handle))
        return decision.status.model_copy(update={"artifacts": artifacts[:_MAX_ARTIFACTS]})

    async def _submit_again(self, key: Key, known: KnownJob, job: FineTuneJob, number: int) -> Look:
        """Submit an attempt that may have been submitted, unless its job fails meanwhile."""
        status = give_up(job, self._now())
        if status is None:
            return await self._submit(key, known, job, number)
        # A creation that was not answered may have been carried out.
        if handle_of((await self._found(key, job)).status) is None:
            await self._report(key, known, status)
        return AT_ONCE

    async def _submit(self, key: Key, known: KnownJob, job: FineTuneJob, number: int) -> Look:
        """Create the attempt, or adopt what was created of it; what is in the way is told."""
        try:
            handle = await self._create(job, number)
        except FineTuneError as error:
            if error.retryable:
                await self._tell_delay(key, known, job, error)
                raise
            log.warning("attempt not created", extra=_about(key, attempt=number, error=error))
            return await self._block(key, known, job, str(error))
        except Exception as error:
            log.exception("attempt not created", extra=_about(key, attempt=number))
            return await self._block(key, known, job, fault_of(job, error))
        self._unwritten.note_handle(key, job.metadata.uid, number, handle)
        log.info("attempt created", extra=_about(key, attempt=number, handle=handle.name))
        if self._is_outside(job):
            await self._report(key, known, self._unwritten.added_to(key, job).status)
        return Look(FIRST_LOOK_SECONDS)

    async def _tell_delay(
        self, key: Key, known: KnownJob, job: FineTuneJob, error: FineTuneError
    ) -> None:
        """Say why an attempt is long in coming; the queue has it tried again."""
        status = delay(job, str(error), self._now(), is_stuck=not error.retryable)
        if isinstance(error, BackendError):  # it was looked for, and does not exist
            status = give_up(job, self._now()) or status
        if status is not None:
            await self._report(key, known, status)

    async def _block(self, key: Key, known: KnownJob, job: FineTuneJob, message: str) -> Look:
        status = block(job, message, self._now())
        _, delay = await self._report(key, known, status)
        return Look(delay.seconds or MENDED_SECONDS)

    async def _create(self, job: FineTuneJob, number: int) -> Handle:
        plan = self._book.plan(job)
        if isinstance(plan, Refusal):
            raise BackendError(plan.message)
        backend, plan = self._backend(job), replace(plan, job=job)  # with its status as it is now
        return await backend.submit(backend.render(plan, Attempt(number)))

    async def _cancel(self, job: FineTuneJob, decision: Decision) -> bool:
        """Cancel the attempt where that was decided; return whether nothing of it is left by now.

        Nobody else would tell: what a backend's own answers have put into its cache is not new
        any more when the watch brings it.
        """
        handle = handle_of(job.status)
        order = next((one for one in decision.actions if isinstance(one, Cancel)), None)
        if order is None or handle is None:
            return False
        backend = self._backend(job)
        await backend.cancel(handle, order.grace_seconds)
        return (await backend.observe(handle)).all_gone

    async def _hold(
        self, key: Key, known: KnownJob, refusal: Refusal, until: str = "the spec can be read"
    ) -> Look:
        """Say what keeps a job from being looked at; an attempt that runs is left alone."""
        metadata = known.metadata
        status = self._unwritten.status_of(key, metadata.uid, known.status)
        status = hold(status, refusal, self._now(), metadata.generation, until)
        if known.is_deleted:
            status = status.model_copy(update={"phase": JobPhase.DELETING})
        await self._report(key, known, status)
        return Look(MENDED_SECONDS)

    async def _stand_by(self, key: Key, known: KnownJob, lacks: Refused) -> Look:
        """Do nothing about a job whose attempts are not shown: what is not seen may yet run."""
        left = lacks.since + _REFUSED_SECONDS - asyncio.get_running_loop().time()
        if left > 0 or known.is_deleted:
            return Look(max(left, LOOK_AGAIN_SECONDS))
        return await self._hold(key, known, refusals.unseen(known, lacks), "it can be seen")

    async def _finalize(self, key: Key, known: KnownJob) -> Look:
        """Stop the attempt of a job that is deleted, say what keeps the job, and then let it go."""
        finalizers = known.raw["metadata"].get("finalizers") or []
        is_outside = FINALIZER in finalizers
        if not finalizers or (ORPHAN in finalizers and not is_outside):
            return NEVER  # it goes without us, or its attempt shall stay
        try:
            look = await self._stop(key, known, finalizers)
        except FineTuneError as error:
            if error.retryable:
                raise
            return await self._hold(key, known, refusals.endless(error), "that is mended")
        if look.again_in_seconds is not None or not is_outside:
            return look
        known = self._book.get(key) or known
        self._forget(key)
        rest = [one for one in finalizers if one != FINALIZER]
        await self._patch(key, known, {"metadata": {"finalizers": rest}})
        log.info("finalizer removed", extra=_about(key))
        return NEVER

    async def _stop(self, key: Key, known: KnownJob, finalizers: Sequence[str]) -> Look:
        """Cancel the open attempt and tell of it; never to be looked at again once it is gone."""
        status, seen = known.status, None
        if known.job is not None:
            status = (await self._last_created(key, known.job)).status
        handle, backend = handle_of(status), None
        if attempts.current(status) is not None and handle is not None:
            backend = self._backends.get(known.backend)
            seen = await backend.observe(handle)
        spec = known.job.spec if known.job is not None else None
        generation = known.metadata.generation
        decision = decide_deletion(
            status, seen, finalizers, spec, now=self._now(), generation=generation
        )
        is_news = is_worth_writing(known.status, decision.status, with_handle=True)
        if is_news and (decision.actions or set(finalizers) - {FINALIZER, FOREGROUND}):
            await self._write(key, known, decision.status)
        order = next(iter(decision.actions), None)
        if backend is None or handle is None or not isinstance(order, Cancel):
            return NEVER
        await backend.cancel(handle, order.grace_seconds)
        return look_in(decision.requeue_seconds)

    async def _last_created(self, key: Key, job: FineTuneJob) -> FineTuneJob:
        """Return the job with its last attempt, also where nobody wrote down that it exists."""
        job = self._unwritten.added_to(key, job)
        is_open = attempts.current(job.status) is not None
        may_exist = is_open or (not job.status.attempt and not self._is_outside(job))
        if not may_exist or handle_of(job.status) is not None:
            return job
        return await self._found(key, job)

    async def _clean_up(self, key: Key, known: KnownJob, ttl_seconds: int | None) -> Look:
        """Delete a finished job when its time is over."""
        ended = known.status.completion_time
        if ttl_seconds is None or ended is None:
            return NEVER
        left = parse_rfc3339(ended) + timedelta(seconds=ttl_seconds) - self._now()
        if left.total_seconds() > 0:
            return Look(left.total_seconds())
        name, namespace = key.name, key.namespace
        uid = known.metadata.uid
        try:
            await self._client.delete(FINE_TUNE_JOBS, name, namespace, uid=uid)
        except (ConflictError, NotFoundError) as error:
            raise _StaleError from error
        log.info("deleted as ttlSecondsAfterFinished says", extra=_about(key))
        return NEVER

    async def _with_finalizer(self, key: Key, known: KnownJob, job: FineTuneJob) -> KnownJob:
        """Add our finalizer to a job whose attempts live outside the cluster, before the first."""
        there = known.raw["metadata"].get("finalizers") or []
        if not self._is_outside(job) or FINALIZER in there:
            return known
        return await self._patch(key, known, {"metadata": {"finalizers": [*there, FINALIZER]}})

    async def _report(
        self, key: Key, known: KnownJob, status: FineTuneJobStatus
    ) -> tuple[KnownJob, Delay]:
        """Write the status if that is worth a write, unless that can wait."""
        with_handle = known.job is not None and self._is_outside(known.job)
        if not is_worth_writing(known.status, status, with_handle=with_handle):
            return known, NO_DELAY
        delay = self._reports.delay(
            key,
            known.status,
            status,
            self._now(),
            created=parse_rfc3339(known.raw["metadata"]["creationTimestamp"]),
            with_handle=with_handle,
            is_busy=self._is_busy(),
        )
        if not delay:
            return await self._write(key, known, status), NO_DELAY
        if status.attempt and not known.status.attempt:
            self._unwritten.note_opened(key, known.raw["metadata"]["uid"], status)
        return known, delay

    async def _write(self, key: Key, known: KnownJob, status: FineTuneJobStatus) -> KnownJob:
        """Write the status, and tell what has become true by it."""
        change = status_patch(known.status, status)
        written = await self._patch(key, known, {"status": change}, is_status=True)
        extra = _about(key, phase=status.phase.value, attempt=status.attempt)
        log.info("status written", extra=extra)
        self._unwritten.note_written(key)
        self._reports.note(key, status, self._now())
        for event in events_between(known.status, status):
            await self._events.post(known.metadata, event)
        return written

    async def _patch(
        self, key: Key, known: KnownJob, change: Object, *, is_status: bool = False
    ) -> KnownJob:
        """Patch exactly the object that was looked at; another look follows if it has changed."""
        metadata = known.raw["metadata"]
        exactly = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        patch = {**change, "metadata": {**change.get("metadata", {}), **exactly}}
        try:
            made = await self._client.patch(
                FINE_TUNE_JOBS,
                key.name,
                key.namespace,
                patch,
                subresource="status" if is_status else None,
            )
        except (ConflictError, NotFoundError) as error:
            raise _StaleError from error
        self._cache.put(trim_metadata(made))
        return self._book.get(key) or known

    async def _read_again(self, key: Key) -> None:
        """Bring the cache up to date: the watch is behind what we were just told."""
        try:
            made = await self._client.get(FINE_TUNE_JOBS, key.name, key.namespace)
        except NotFoundError:
            if (there := self._cache.get(key)) is not None:
                self._cache.remove(there)
        else:
            self._cache.put(trim_metadata(made))

    async def _as_it_is(self, key: Key, known: KnownJob, job: FineTuneJob) -> FineTuneJob:
        """Return the job with what its status does not hold yet, looked for where it may be."""
        job = self._unwritten.added_to(key, job)
        is_open = attempts.current(job.status) is not None
        is_unknown = not job.status.attempt or (is_open and job.status.backend_ref is None)
        is_inside = self._backends.live_in_cluster(job.spec.backend.type)
        is_told_to_stop = is_or_was_suspended(job) or is_finished(job.status)
        is_looked_for = is_inside or (is_open and is_told_to_stop)
        if not is_unknown or not is_looked_for:
            return job
        try:
            return await self._found(key, job)
        except FineTuneError as error:
            await self._tell_delay(key, known, job, error)
            raise

    async def _found(self, key: Key, job: FineTuneJob) -> FineTuneJob:
        """Look for an attempt that was created and not written down, by its name."""
        number = job.status.attempt or 1
        found = await self._backend(job).find(job, Attempt(number))
        if found is None:
            return job
        if not job.status.attempt:
            status = as_opened(job, found, self._now(), self._book.plan(job))
            job = job.model_copy(update={"status": self._folders.opened(key, status)})
        self._unwritten.note_handle(key, job.metadata.uid, number, found.handle)
        log.info("attempt found", extra=_about(key, attempt=number, handle=found.handle.name))
        return self._unwritten.added_to(key, job)

    def _forget(self, key: Key) -> None:
        self._unwritten.forget(key)
        self._observer.forget(key)
        self._reports.forget(key)

    def _backend(self, job: FineTuneJob) -> Backend:
        return self._backends.get(job.spec.backend.type)

    def _is_outside(self, job: FineTuneJob) -> bool:
        """Say whether the job's attempts outlive it: nothing in the cluster would collect them."""
        return self._backends.live_in_cluster(job.spec.backend.type) is False


class _StaleError(Exception):
    """The object is not the one that was looked at any more."""


def _about(key: Key, **fields: object) -> dict[str, object]:
    return {"job": str(key), **fields}

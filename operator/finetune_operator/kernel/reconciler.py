"""Reconcile one job: observe, decide, act, and write the status if it says more than before.

Called by the workers, for one key at a time. Nothing here waits for anything to happen, and nothing
is kept that could not be found again: after a crash at any point the next reconcile goes on.

What makes that safe: an attempt's children have names that follow from the job and the attempt's
number, so creating them again adopts them; a later attempt is opened in the status before anything
of it is created, and the first one is found by its name where the status lacks it;
whatever else the status lacks is observed again and written later.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from datetime import datetime

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.backends.base import Observation
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.events import EventPoster, warning
from finetune_operator.kernel.finalizer import Finalizer
from finetune_operator.kernel.folders import FolderBook, RivalsFirstError
from finetune_operator.kernel.informer import NotShown
from finetune_operator.kernel.jobs import JobIndex, JobView, PendingStatuses
from finetune_operator.kernel.kept_in_git import recreation
from finetune_operator.kernel.ledgers import LedgerBook
from finetune_operator.kernel.queue import AT_ONCE, NEVER, SHORTEST_WAIT_SECONDS, Result
from finetune_operator.kernel.status_writer import NO_DELAY, Delay, StaleError, StatusWriter
from finetune_operator.kernel.verbs import (
    OBSERVE_AGAIN_SECONDS,
    Actions,
    Observer,
    endless,
    unreadable,
    unseen,
)
from finetune_operator.kube.cache import Key, ObjectCache, key_of
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.metrics.counts import Counts
from finetune_operator.metrics.job_values import JobNow
from finetune_operator.planner.plan import Plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import is_finished
from finetune_operator.reconcile.decide import (
    RECHECK_SECONDS,
    Decision,
    Find,
    Rejection,
    Submit,
    SubmitFailed,
    decide,
    unreconcilable,
)

log = logging.getLogger(__name__)

FIRST_OBSERVATION_SECONDS = 1.5
"""How long after an attempt was created it is observed, unless an event of it comes before."""
_NOT_SHOWN_SECONDS = 30.0  # an API server that starts may refuse for a moment what it allows then


class Reconciler:
    """Reconciles jobs of one cluster.

    Args:
        client: For status, finalizers and deletions of jobs; children are the backends' part.
        cache: The FineTuneJobs; answers to writes are put into it.
        backends: Who runs attempts.
        events: Posts Events.
        now: The time, with a zone.
        not_shown: What keeps a backend's attempts in a namespace from being seen; by both names.
        is_busy: Whether others than this job wait to be reconciled, which comes before reporting.
        wake: Has a job reconciled, as what it waited for may be there.
        ledgers: Who keeps account of the jobs' time.
    """

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        backends: Backends,
        events: EventPoster,
        *,
        now: Callable[[], datetime],
        not_shown: Callable[[str, str], NotShown | None] = lambda namespace, backend: None,
        is_busy: Callable[[Key], bool] = lambda key: False,
        wake: Callable[[Key], None] = lambda key: None,
        ledgers: LedgerBook | None = None,
    ) -> None:
        self._cache = cache
        self._backends = backends
        self._events = events
        self._now = now
        self._not_shown = not_shown
        self._pending = PendingStatuses()
        self._index = JobIndex(cache.get, backends, self._pending)
        self._folders = FolderBook(cache, self._index.get, backends, self._pending, wake)
        book = self._ledgers = LedgerBook(Counts(), now) if ledgers is None else ledgers
        self._observer = Observer(
            backends, self._index, self._pending, self._folders.opened, book, now
        )
        self._writer = StatusWriter(
            client,
            cache,
            self._index,
            self._pending,
            backends,
            events,
            book,
            now=now,
            is_busy=is_busy,
        )
        self._actions = Actions(backends, self._index, self._writer, now)
        self._finalizer = Finalizer(
            self._writer, backends, self._observer, self._actions, events, now
        )

    def is_new(self, key: Key) -> bool:
        """Say whether the job waits to be reconciled for the first time."""
        return self._index.is_new(key)

    def jobs_now(self) -> Iterator[JobNow]:
        """Yield what the page of metrics shows of each job that is ours."""
        for made in self._cache:
            view = self._index.get(key_of(made))
            if view is None or not view.is_ours:
                continue
            if (now := self._ledgers.now_of(view)) is not None:
                yield now
        yield from self._ledgers.deleted()

    async def reconcile(self, key: Key) -> Result:
        """Reconcile one job.

        Raises:
            FineTuneError: try again later.
        """
        self._folders.catch_up()
        view = self._index.get(key)
        if view is None:
            if await self._folders.is_written_still(key):
                return Result(RECHECK_SECONDS)  # or when its pods go
            self._forget(key)
            self._ledgers.remove(key)
            return NEVER
        if not view.is_ours:
            return NEVER
        try:
            if (missing := self._not_shown(key.namespace, view.backend)) is not None:
                return await self._stand_by(view, missing)
            if view.is_deleted:
                return await self._finalize(view)
            if view.rejection is not None:
                return await self._reject(view, view.rejection)
            return await self._reconcile(view)
        except StaleError:
            await self._writer.read_again(key)
            return AT_ONCE
        except RivalsFirstError:
            return Result(OBSERVE_AGAIN_SECONDS)
        finally:
            self._folders.settle(key)

    async def _reconcile(self, view: JobView) -> Result:
        view = await self._find_lost(view)
        try:
            observation = await self._observer.observe(view)
        except FineTuneError as error:
            if error.retryable:
                raise
            return await self._reject(view, unreadable(view, error), "that is fixed")
        if observation is not None and observation.warning:
            await self._events.post(view.metadata, warning(observation.warning))
        plan = await self._plan(view, observation)
        if not self._index.is_current(view):
            return AT_ONCE  # it changed while its inputs were checked
        # No await from here on until its folders are noted: two jobs could have the same.
        observation = self._actions.hinder(view, observation)
        decision = decide(view.job, observation, self._now(), plan)
        if (submit := decision.action(Submit)) is not None:
            return await self._open(view, decision.status, submit.number)
        if decision.action(Find) is not None:
            return await self._give_up(view)
        # Before Complete is written: after a crash it is asked again.
        status = await self._actions.collect(view, decision, observation)
        view, delay = await self._writer.report(view, status)
        if await self._actions.cancel(view, decision, observation):
            return AT_ONCE
        if is_finished(view.status) and view.attempt is None:
            self._forget(view.key)
            self._index.forget(view)
            return await self._finalizer.finish(view)
        return _wait(decision, delay)

    async def _find_lost(self, view: JobView) -> JobView:
        try:
            return await self._observer.find_lost(view)
        except FineTuneError as error:
            is_stuck = not error.retryable
            failed = SubmitFailed(str(error), is_absent=error.is_absent, needs_fix=is_stuck)
            await self._tell_failed(view, failed)
            raise

    async def _plan(self, view: JobView, observation: Observation | None) -> Plan | Rejection:
        """Validate a job only where an attempt may be opened: one that is open is left alone."""
        lives = view.attempt is not None and not (observation and observation.all_gone)
        if lives or is_finished(view.status):
            return self._index.plan(view.job)
        validated = await self._index.validate(view)
        if isinstance(validated, Rejection) or view.job.spec.suspend:
            return validated
        return self._folders.rejection(view.key) or validated

    async def _open(self, view: JobView, status: FineTuneJobStatus, number: int) -> Result:
        """Submit the attempt that the status opens; that is written first, unless it was before."""
        if status != view.status:
            needs_finalizer = self._backends.needs_finalizer(view.backend)
            if needs_finalizer and (left := self._finalizer.seconds_until_kept(view)):
                await self._finalizer.add(view)
                return Result(left)
            status = self._folders.opened(view.key, status)  # before any other job is reconciled
            view, _ = await self._writer.report(view, status)
        try:
            handle = await self._actions.create(view, number)
        except FineTuneError as error:
            if error.retryable:
                failed = SubmitFailed(str(error), is_absent=error.is_absent)
                await self._tell_failed(view, failed)
                raise
            log.warning("attempt not created", extra=_about(view, attempt=number, error=error))
            # It may have been refused before anybody has looked for it.
            return await self._tell_failed(view, SubmitFailed(str(error), needs_fix=True))
        self._pending.note_handle(view, number, handle)
        log.info("attempt created", extra=_about(view, attempt=number, handle=handle.name))
        if number == 1 and (event := recreation(view.raw["metadata"], view.job)) is not None:
            await self._events.post(view.metadata, event)
        if self._backends.finds_from_cache(view.backend) is False:
            await self._writer.report(view, attempts.with_handle(view.status, handle))
        return Result(FIRST_OBSERVATION_SECONDS)

    async def _give_up(self, view: JobView) -> Result:
        """Fail a job whose attempt was not created in time, once it cannot appear any more."""
        if self._backends.of(view.job).backend.limits.late_submit:
            stopped, _ = attempts.stop(view.status, 0.0, self._now())  # nothing is submitted now
            view, _ = await self._writer.report(view, stopped)
        found = await self._observer.find(view)
        if found.handle is not None:  # it goes on, unless it is told to stop again
            status = attempts.change_current(found.status, stop_deadline=None)
            await self._writer.report(found, status)
            return AT_ONCE
        seen = self._observer.observe_absent(view)
        if not seen.all_gone:
            return Result(seen.requeue_seconds)
        await self._tell_failed(view, SubmitFailed("nothing of it was created", is_absent=True))
        return AT_ONCE

    async def _tell_failed(self, view: JobView, failed: SubmitFailed) -> Result:
        """Say what keeps the open attempt from being created, or that its job fails for that."""
        decision = decide(view.job, failed, self._now(), self._index.plan(view.job))
        if decision.status == view.status:
            return _wait(decision, NO_DELAY)
        _, delay = await self._writer.report(view, decision.status)
        return _wait(decision, delay)

    async def _reject(
        self, view: JobView, rejection: Rejection, until: str = "the spec can be read"
    ) -> Result:
        """Say what keeps a job from being reconciled; an attempt that runs is left alone."""
        status = unreconcilable(
            view.status, rejection, self._now(), view.metadata.generation, until
        )
        if view.is_deleted:
            status = status.model_copy(update={"phase": JobPhase.DELETING})
        await self._writer.report(view, status)
        return Result(RECHECK_SECONDS)

    async def _stand_by(self, view: JobView, missing: NotShown) -> Result:
        """Do nothing about a job whose attempts are not shown: what is not seen may yet run."""
        left = missing.since + _NOT_SHOWN_SECONDS - asyncio.get_running_loop().time()
        if left > 0 or (view.is_deleted and FINALIZER not in view.finalizers):
            return Result(max(left, OBSERVE_AGAIN_SECONDS))
        return await self._reject(view, unseen(view, missing), "it can be seen")

    async def _finalize(self, view: JobView) -> Result:
        try:
            return await self._finalizer.finalize(view)
        except FineTuneError as error:
            if error.retryable:
                raise
            return await self._reject(view, endless(error), "that is fixed")

    def _forget(self, key: Key) -> None:
        self._pending.forget(key)
        self._observer.forget(key)
        self._actions.forget(key)
        self._writer.forget(key)
        self._finalizer.forget(key)


def _wait(decision: Decision, delay: Delay) -> Result:
    """Requeue for when the decision says so, or when its status is to be written."""
    waits = [one for one in (decision.requeue_seconds, delay.seconds or None) if one is not None]
    if not waits:
        return NEVER
    return Result(max(min(waits), SHORTEST_WAIT_SECONDS), when_idle=delay.until_idle)


def _about(view: JobView, **fields: object) -> dict[str, object]:
    return {"job": str(view.key), **fields}

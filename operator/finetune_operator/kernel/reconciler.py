"""Reconcile one job: observe, decide, act, and write the status if it has changed.

Called by the workers, for one key at a time. Never blocks; all in-memory state can be rebuilt, so
the next reconcile resumes after a crash at any point.

Two rules make that safe. An attempt is recorded as open in the status before any of its children is
created. And the names of children follow from the job and the attempt's number, so creating them
again adopts them. All other facts are observed again and written later.
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
from finetune_operator.kernel.adoption import Adoption
from finetune_operator.kernel.events import EventPoster, warning
from finetune_operator.kernel.finalizer import Finalizer
from finetune_operator.kernel.folders import FolderBook
from finetune_operator.kernel.informer import NotShown
from finetune_operator.kernel.jobs import JobIndex, JobView, is_ours
from finetune_operator.kernel.kept_in_git import recreation
from finetune_operator.kernel.ledgers import LedgerBook
from finetune_operator.kernel.queue import AT_ONCE, NEVER, SHORTEST_WAIT_SECONDS, Result
from finetune_operator.kernel.status_writer import StaleError, StatusWriter
from finetune_operator.kernel.verbs import (
    OBSERVE_AGAIN_SECONDS,
    Actions,
    Observer,
    deletion_blocked,
    unreadable,
    unseen,
)
from finetune_operator.kube.cache import Key, ObjectCache
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
"""Delay before a created attempt is observed, if no event of it comes earlier."""
_NOT_SHOWN_SECONDS = 30.0  # a starting API server may refuse requests for a moment


class Reconciler:
    """Reconciles jobs of one cluster.

    Args:
        client: Writes status, finalizers and deletions of jobs; backends write the children.
        cache: The FineTuneJobs; responses to writes are put into it.
        backends: Run attempts.
        events: Posts Events.
        now: The time, with a zone.
        not_shown: Returns why a backend's attempts are hidden, given the names of backend and
            namespace.
        wake: Requeues a job that a folder conflict may no longer block.
        ledgers: Time ledgers of the jobs.
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
        wake: Callable[[Key], None] = lambda key: None,
        ledgers: LedgerBook | None = None,
    ) -> None:
        self._cache = cache
        self._backends = backends
        self._events = events
        self._now = now
        self._not_shown = not_shown
        self._index = JobIndex(cache.get, backends)
        self._folders = FolderBook(cache, self._index.get, backends, wake)
        self._adoption = Adoption(backends, self._index, now)
        book = self._ledgers = LedgerBook(Counts(), now) if ledgers is None else ledgers
        self._observer = Observer(backends, book, now)
        self._writer = StatusWriter(client, cache, self._index, backends, events, book, now=now)
        self._actions = Actions(backends, self._index, self._writer, now)
        self._finalizer = Finalizer(
            self._writer, backends, self._observer, self._actions, events, now
        )

    def is_new(self, key: Key) -> bool:
        """Whether the job has never been reconciled."""
        return self._index.is_new(key)

    def jobs_now(self) -> Iterator[JobNow]:
        """Yield the figures of each of our jobs for the metrics page."""
        for obj in self._cache:
            if is_ours(obj) and (now := self._ledgers.now_of(obj, self._index.get)) is not None:
                yield now
        yield from self._ledgers.deleted()

    async def reconcile(self, key: Key) -> Result:
        """Reconcile one job.

        Raises:
            FineTuneError: Try again later.
        """
        self._folders.catch_up()
        view = self._index.get(key)
        if view is None:
            if await self._folders.has_live_writer(key):
                return Result(RECHECK_SECONDS)  # or when its pods are deleted
            self._ledgers.remove(key)
            return NEVER
        if not view.is_ours:
            return NEVER
        is_certain = False
        try:
            try:
                result = await self._reconcile(view)
            except StaleError:
                await self._writer.read_again(key)
                result = AT_ONCE
            is_certain = True
            return result
        finally:
            self._folders.record_result(key, is_certain=is_certain)

    async def _reconcile(self, view: JobView) -> Result:
        if (missing := self._not_shown(view.key.namespace, view.backend)) is not None:
            return await self._leave_alone(view, missing)
        if (status := await self._adoption.adopted(view)) is not None:
            await self._writer.write(view, self._folders.opened(view.key, status))
            return AT_ONCE
        if view.is_deleted:
            return await self._finalize(view)
        if view.rejection is not None:
            return await self._reject(view, view.rejection)
        return await self._observe_and_act(view)

    async def _observe_and_act(self, view: JobView) -> Result:
        view = await self._find_unrecorded(view)
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
            return AT_ONCE  # the job changed while its inputs were checked
        # No await from here until the folders are recorded: two jobs could get the same folder.
        observation = self._actions.with_recorded_failure(view, observation)
        decision = decide(view.job, observation, self._now(), plan)
        if (submit := decision.action(Submit)) is not None:
            return await self._open(view, decision.status, submit.number)
        if decision.action(Find) is not None:
            return await self._give_up(view)
        # Before Complete is written: after a crash the artifacts are collected again.
        status = await self._actions.collect(view, decision, observation)
        view, delay_seconds = await self._writer.report(view, status)
        if await self._actions.cancel(view, decision, observation):
            return AT_ONCE
        if is_finished(view.status) and view.attempt is None:
            self._index.forget(view)
            return await self._finalizer.finish(view)
        return _requeue(decision, delay_seconds)

    async def _find_unrecorded(self, view: JobView) -> JobView:
        try:
            return await self._observer.find_unrecorded(view)
        except FineTuneError as error:
            is_stuck = not error.retryable
            failed = SubmitFailed(str(error), is_absent=error.is_absent, needs_fix=is_stuck)
            await self._report_failure(view, failed)
            raise

    async def _plan(self, view: JobView, observation: Observation | None) -> Plan | Rejection:
        """Return the job's plan, validated only if an attempt may be opened."""
        lives = view.attempt is not None and not (observation and observation.all_gone)
        if lives or is_finished(view.status):
            return self._index.plan(view)
        plan = self._index.validate(view)
        may_open = not view.job.spec.suspend
        if not isinstance(plan, Rejection) and may_open:
            plan = self._folders.rejection(view.key) or plan
        if isinstance(plan, Rejection):
            return plan
        plan = await self._index.check_inputs(view, plan)
        if isinstance(plan, Rejection) or not may_open:
            return plan
        return self._folders.rejection(view.key) or plan  # another job may have opened meanwhile

    async def _open(self, view: JobView, status: FineTuneJobStatus, number: int) -> Result:
        """Write the status with the attempt opened, unless that was done before; then submit."""
        if status != view.status:
            needs_finalizer = self._backends.needs_finalizer(view.backend)
            if needs_finalizer and (left := self._finalizer.finalizer_settle_seconds(view)):
                await self._finalizer.add(view)
                return Result(left)
            status = self._folders.opened(view.key, status)  # before any other job is reconciled
            view = await self._writer.write(view, status)
        try:
            handle = await self._actions.create(view, number)
        except FineTuneError as error:
            if error.retryable:
                failed = SubmitFailed(str(error), is_absent=error.is_absent)
                await self._report_failure(view, failed)
                raise
            log.warning("attempt not created", extra=_about(view, attempt=number, error=error))
            # Not `is_absent`: the backend may have refused before it searched for the attempt.
            return await self._report_failure(view, SubmitFailed(str(error), needs_fix=True))
        view.memory.submitted = (number, handle)
        log.info("attempt created", extra=_about(view, attempt=number, handle=handle.name))
        if number == 1 and (event := recreation(view.raw["metadata"], view.job)) is not None:
            await self._events.post(view.metadata, event)
        if self._backends.finds_from_cache(view.backend) is False:
            await self._writer.report(view, attempts.with_handle(view.status, handle))
        return Result(FIRST_OBSERVATION_SECONDS)

    async def _give_up(self, view: JobView) -> Result:
        """Fail a job whose attempt missed its deadline, once its creation is ruled out."""
        if self._backends.of(view.job).backend.limits.late_submit:
            stopped, _ = attempts.stop(view.status, 0.0, self._now())  # forbids another submit
            view, _ = await self._writer.report(view, stopped)
        found = await self._observer.find(view)
        if found.handle is not None:  # the attempt continues, unless it is stopped again
            status = attempts.change_current(found.status, stop_deadline=None)
            await self._writer.report(found, status)
            return AT_ONCE
        seen = self._observer.observe_absent(view)
        if not seen.all_gone:
            return Result(seen.requeue_seconds)
        await self._report_failure(view, SubmitFailed("it was never created", is_absent=True))
        return AT_ONCE

    async def _report_failure(self, view: JobView, failed: SubmitFailed) -> Result:
        """Report why the open attempt cannot be created, or fail its job for that reason."""
        decision = decide(view.job, failed, self._now(), self._index.plan(view))
        if decision.status == view.status:
            return _requeue(decision)
        _, delay_seconds = await self._writer.report(view, decision.status)
        return _requeue(decision, delay_seconds)

    async def _reject(
        self, view: JobView, rejection: Rejection, until: str = "the spec can be read"
    ) -> Result:
        """Report why a job cannot be reconciled; a running attempt is left alone."""
        status = unreconcilable(
            view.status, rejection, self._now(), view.metadata.generation, until
        )
        if view.is_deleted:
            status = status.model_copy(update={"phase": JobPhase.DELETING})
        await self._writer.report(view, status)
        return Result(RECHECK_SECONDS)

    async def _leave_alone(self, view: JobView, missing: NotShown) -> Result:
        """Leave a job alone whose attempts the API server hides: they may be running."""
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
            return await self._reject(view, deletion_blocked(error), "that is fixed")


def _requeue(decision: Decision, delay_seconds: float = 0.0) -> Result:
    """Return when to reconcile again: for the decision, or to write a delayed status."""
    waits = [wait for wait in (decision.requeue_seconds, delay_seconds or None) if wait is not None]
    return Result(max(min(waits), SHORTEST_WAIT_SECONDS)) if waits else NEVER


def _about(view: JobView, **fields: object) -> dict[str, object]:
    return {"job": str(view.key), **fields}

"""Deletion waits for the attempt; finished jobs expire by TTL.

Called by `Reconciler`. A job gets our finalizer if its attempts would outlive it, because no owner
reference deletes them. A deleted job without our finalizer gets status updates only while another
finalizer blocks its deletion.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from finetune_operator.backends.base import AttemptPhase, AttemptRef, Observation
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import BackendError, FineTuneError, TransientError
from finetune_operator.kernel.events import EventPoster, EventType, JobEvent
from finetune_operator.kernel.jobs import JobView
from finetune_operator.kernel.queue import NEVER, SHORTEST_WAIT_SECONDS, Result
from finetune_operator.kernel.status_writer import StatusWriter, is_worth_writing
from finetune_operator.kernel.verbs import Actions, Observer, deletion_blocked
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.reconcile.conditions import is_finished, parse_rfc3339, rfc3339
from finetune_operator.reconcile.decide import Cancel, Decision
from finetune_operator.reconcile.deleting import FOREGROUND, ORPHAN, decide_deletion

log = logging.getLogger(__name__)

DELETION_SECONDS = 1.0
"""Longest assumed duration of a deletion that the API server has begun; it takes milliseconds."""


class Finalizer:
    """Adds and removes our finalizer, and deletes expired jobs.

    Args:
        writer: Writes the status and finalizers, and deletes jobs.
        backends: Cancel attempts.
        observer: Searches for attempts that may exist although the status has no handle.
        actions: Records failures.
        events: Posts Events.
        now: The time, with a zone.
    """

    def __init__(
        self,
        writer: StatusWriter,
        backends: Backends,
        observer: Observer,
        actions: Actions,
        events: EventPoster,
        now: Callable[[], datetime],
    ) -> None:
        self._writer = writer
        self._backends = backends
        self._observer = observer
        self._actions = actions
        self._events = events
        self._now = now

    async def add(self, view: JobView) -> None:
        """Add our finalizer if it is missing.

        Raises:
            StaleError: The job has changed.
        """
        if FINALIZER not in view.finalizers:
            change = {"metadata": {"finalizers": [*view.finalizers, FINALIZER]}}
            await self._writer.patch(view, change)

    def finalizer_settle_seconds(self, view: JobView) -> float:
        """Return how long the first attempt has to wait until our finalizer is sure to work.

        A deletion that the API server began before the finalizer was added still removes the job,
        because the server does not read the job again. After this wait no such deletion is left, so
        a job with an attempt stays until the attempt has ended. A new leader waits again, because
        it does not know when the finalizer was added.
        """
        if view.status.attempt:
            return 0.0
        since = view.memory.finalizer_since
        if since is None or FINALIZER not in view.finalizers:
            view.memory.finalizer_since = self._now()
            return DELETION_SECONDS
        return max(0.0, DELETION_SECONDS - (self._now() - since).total_seconds())

    async def finalize(self, view: JobView) -> Result:
        """Stop the attempt of a deleted job, report what blocks deletion, remove our finalizer.

        Raises:
            StaleError: The job has changed.
            FineTuneError: The attempt cannot be ended; see `retryable`.
        """
        has_ours = FINALIZER in view.finalizers
        if not view.finalizers or (ORPHAN in view.finalizers and not has_ours):
            return NEVER  # not our finalizer, or --cascade=orphan: nothing to do
        last, seen, failure = await self._observe(view)
        view, decision = await self._report(view, last, seen)
        order, has_ended = decision.action(Cancel), failure is None
        if order is not None and last.ref is not None:
            try:
                has_ended = await self._cancel(last, last.ref, order.until)
            except FineTuneError as error:
                failure = error
        elif order is not None:
            has_ended = False
        if failure is not None:
            message = deletion_blocked(failure).message
            if failure.retryable and self._actions.record_failure(view, message, failure):
                await self._report(view, last.with_status(decision.status), seen)
            raise failure
        view.memory.forget_failures()
        if not has_ended:
            return Result(max(decision.requeue_seconds or 0.0, SHORTEST_WAIT_SECONDS))
        if has_ours:
            await self._remove(view)
        return NEVER

    async def finish(self, view: JobView) -> Result:
        """Remove our finalizer from a finished job; delete the job once its TTL has expired.

        Raises:
            StaleError: The job has changed.
        """
        if FINALIZER in view.finalizers and is_finished(view.written):
            view = await self._remove(view)
        ttl_seconds, ended = view.job.spec.ttl_seconds_after_finished, view.status.completion_time
        if ttl_seconds is None or ended is None:
            return NEVER
        left = parse_rfc3339(ended) + timedelta(seconds=ttl_seconds) - self._now()
        if left.total_seconds() > 0:
            return Result(left.total_seconds())
        await self._writer.delete(view)
        log.info("deleted after ttlSecondsAfterFinished", extra={"job": str(view.key)})
        return NEVER

    async def _remove(self, view: JobView) -> JobView:
        rest = [finalizer for finalizer in view.finalizers if finalizer != FINALIZER]
        view = await self._writer.patch(view, {"metadata": {"finalizers": rest}})
        log.info("finalizer removed", extra={"job": str(view.key)})
        return view

    async def _observe(
        self, view: JobView
    ) -> tuple[JobView, Observation | None, FineTuneError | None]:
        """Return the job with its last attempt, and the observation or else the error."""
        try:
            last = await self._last_created(view)
        except FineTuneError as error:
            if not error.retryable:
                raise
            return view, Observation(AttemptPhase.UNKNOWN), error
        return last, await self._observer.observe(last), None

    async def _report(
        self, view: JobView, last: JobView, seen: Observation | None
    ) -> tuple[JobView, Decision]:
        """Decide, and write the status if the job outlives the write; return the written job."""
        decision = decide_deletion(
            last.status,
            self._actions.with_recorded_failure(view, seen),
            view.finalizers,
            view.job.spec if view.parsed is not None else None,
            now=self._now(),
            generation=view.metadata.generation,
        )
        is_news = is_worth_writing(view.written, decision.status, with_handle=True)
        if is_news and (decision.actions or set(view.finalizers) - {FINALIZER, FOREGROUND}):
            view = await self._writer.write(view, decision.status)
        return view, decision

    async def _cancel(self, view: JobView, ref: AttemptRef, until: datetime) -> bool:
        """Cancel the attempt; return whether its job may be deleted even if the attempt still runs.

        Raises:
            FineTuneError: The backend has not accepted the cancel, or does not respond.
        """
        if not await self._backends.get(view.backend).cancel(ref, until):
            raise TransientError(f"{ref.handle.name} has not accepted to be cancelled yet")
        return await self._cancel_unconfirmed_too_long(view, ref, until)

    async def _cancel_unconfirmed_too_long(
        self, view: JobView, ref: AttemptRef, until: datetime
    ) -> bool:
        """Whether an accepted cancel had no effect for too long; posts an Event about it."""
        bound = self._backends.get(view.backend).backend.limits.unconfirmed_cancel
        if bound is None or self._now() < until + timedelta(seconds=bound):
            return False
        handle = ref.handle
        text = (
            f"attempt {ref.number} was asked to stop by {rfc3339(until)} and its end was never "
            f"confirmed; {handle.kind} {handle.name} may still run{handle.url and ', see '}"
            f"{handle.url}; end it there"
        )
        log.warning("cancel not confirmed", extra={"job": str(view.key), "handle": handle.name})
        event = JobEvent(EventType.WARNING, "CancelUnconfirmed", text)
        return await self._events.post(view.metadata, event)

    async def _last_created(self, view: JobView) -> JobView:
        """Return the job with its last attempt, even if the status lacks the attempt's handle.

        Raises:
            FineTuneError: It is unknown whether the attempt exists.
        """
        if view.handle is not None or view.attempt is None:
            return view
        if view.parsed is not None:
            return await self._observer.find(view)
        if FINALIZER in view.finalizers:
            raise BackendError(
                f"attempt {view.attempt.number} may exist, and cannot be searched for while "
                "the spec cannot be read"
            )
        return view

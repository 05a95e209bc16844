"""How a job goes: what is deleted stays until its attempt has ended, what is over for long goes.

`Reconciler` calls it. A job whose attempts outlive it has our finalizer, as nothing would collect
them; the status of a job that goes without us is written only while something else keeps it.
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
from finetune_operator.kernel.verbs import Actions, Observer, endless
from finetune_operator.kube.cache import Key
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.reconcile.conditions import is_finished, parse_rfc3339, rfc3339
from finetune_operator.reconcile.decide import Cancel, Decision
from finetune_operator.reconcile.deleting import FOREGROUND, ORPHAN, decide_deletion

log = logging.getLogger(__name__)

DELETION_SECONDS = 1.0
"""By then an API server has ended a deletion that it has begun; it takes milliseconds."""


class Finalizer:
    """Lets jobs go.

    Args:
        writer: For finalizers and deletions, and for the status meanwhile.
        backends: Who ends attempts.
        observer: Who looks for attempts that may exist though nobody wrote that down.
        actions: Who knows what has failed before.
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
        self._kept_since: dict[Key, tuple[str, datetime]] = {}

    async def add(self, view: JobView) -> None:
        """Add our finalizer where it is missing.

        Raises:
            StaleError: the job has changed.
        """
        if FINALIZER not in view.finalizers:
            change = {"metadata": {"finalizers": [*view.finalizers, FINALIZER]}}
            await self._writer.patch(view, change)

    def seconds_until_kept(self, view: JobView) -> float:
        """Return how long to wait before the first attempt, until our finalizer keeps the job.

        A deletion that the API server has begun before the finalizer came takes the job away all
        the same: it has read the job without one, and does not look again. What is created once
        such deletions are over has a job that stays until it has ended. Whoever takes over waits
        anew, as it does not know when the finalizer came.
        """
        if view.status.attempt:
            return 0.0
        uid, since = self._kept_since.get(view.key, ("", self._now()))
        if uid != view.uid or FINALIZER not in view.finalizers:
            self._kept_since[view.key] = (view.uid, self._now())
            return DELETION_SECONDS
        return max(0.0, DELETION_SECONDS - (self._now() - since).total_seconds())

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is over or gone."""
        self._kept_since.pop(key, None)

    async def finalize(self, view: JobView) -> Result:
        """Stop the attempt of a job that is deleted, say what keeps the job, and then let it go.

        Raises:
            StaleError: the job has changed.
            FineTuneError: the attempt cannot be ended; `retryable` says whether to try again.
        """
        has_ours = FINALIZER in view.finalizers
        if not view.finalizers or (ORPHAN in view.finalizers and not has_ours):
            return NEVER  # it goes without us, or its attempt shall stay
        last, seen, failure = await self._observe(view)
        view, decision = await self._tell(view, last, seen)
        order, is_over = decision.action(Cancel), failure is None
        if order is not None and last.ref is not None:
            try:
                is_over = await self._cancel(last, last.ref, order.until)
            except FineTuneError as error:
                failure = error
        elif order is not None:
            is_over = False
        if failure is not None:
            if failure.retryable and self._actions.obstruct(
                view.key, endless(failure).message, failure
            ):
                await self._tell(view, last.with_status(decision.status), seen)
            raise failure
        self._actions.forget(view.key)
        if not is_over:
            return Result(max(decision.requeue_seconds or 0.0, SHORTEST_WAIT_SECONDS))
        if has_ours:
            await self._remove(view)
        return NEVER

    async def finish(self, view: JobView) -> Result:
        """Take our finalizer off a finished job; delete it once its TTL is over.

        Raises:
            StaleError: the job has changed.
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
        log.info("deleted as ttlSecondsAfterFinished says", extra={"job": str(view.key)})
        return NEVER

    async def _remove(self, view: JobView) -> JobView:
        rest = [one for one in view.finalizers if one != FINALIZER]
        view = await self._writer.patch(view, {"metadata": {"finalizers": rest}})
        log.info("finalizer removed", extra={"job": str(view.key)})
        return view

    async def _observe(
        self, view: JobView
    ) -> tuple[JobView, Observation | None, FineTuneError | None]:
        """Return the job with its last attempt, what is seen of that, and why nobody can say."""
        try:
            last = await self._last_created(view)
        except FineTuneError as error:
            if not error.retryable:
                raise
            return view, Observation(AttemptPhase.UNKNOWN), error
        return last, await self._observer.observe(last), None

    async def _tell(
        self, view: JobView, last: JobView, seen: Observation | None
    ) -> tuple[JobView, Decision]:
        """Decide, and write the status where somebody may see it; return the written job."""
        decision = decide_deletion(
            last.status,
            self._actions.hinder(view, seen),
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
        """Cancel the attempt; return whether its job may go though it was seen last.

        Raises:
            FineTuneError: it does not accept that, or cannot be asked.
        """
        if not await self._backends.get(view.backend).cancel(ref, until):
            raise TransientError(f"{ref.handle.name} has not accepted to be cancelled yet")
        return await self._is_let_go(view, ref, until)

    async def _is_let_go(self, view: JobView, ref: AttemptRef, until: datetime) -> bool:
        """Say whether an accepted cancel had no effect for too long; an Event says so."""
        bound = self._backends.get(view.backend).backend.limits.unconfirmed_cancel
        if bound is None or self._now() < until + timedelta(seconds=bound):
            return False
        handle = ref.handle
        text = (
            f"attempt {ref.number} was told to stop by {rfc3339(until)} and its end was never "
            f"confirmed; {handle.kind} {handle.name} may still run{handle.url and ', see '}"
            f"{handle.url}; end it there"
        )
        log.warning("cancel not confirmed", extra={"job": str(view.key), "handle": handle.name})
        event = JobEvent(EventType.WARNING, "CancelUnconfirmed", text)
        return await self._events.post(view.metadata, event)

    async def _last_created(self, view: JobView) -> JobView:
        """Return the job with its last attempt, also where nobody wrote down that it exists.

        Raises:
            FineTuneError: that cannot be said.
        """
        if view.handle is not None:
            return view
        if view.parsed is None:
            if view.attempt is not None and FINALIZER in view.finalizers:
                raise BackendError(
                    f"attempt {view.attempt.number} may exist, and cannot be searched for while "
                    "the spec cannot be read"
                )
            return view
        is_free = self._backends.finds_from_cache(view.backend) is not False
        may_exist = view.attempt is not None or (not view.status.attempt and is_free)
        return await self._observer.find(view) if may_exist else view

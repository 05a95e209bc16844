"""How a job goes: what is deleted stays until its attempt has ended, what is over for long goes.

`Reconciler` calls it. A job whose attempts outlive it has our finalizer, as nothing would collect
them; a job that goes without us is only told of while something else keeps it.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from finetune_operator.backends.instances import Backends
from finetune_operator.kernel.jobs import JobView, Observer
from finetune_operator.kernel.queue import NEVER, SHORTEST_WAIT_SECONDS, Result
from finetune_operator.kernel.status_writer import StatusWriter, is_worth_writing
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.reconcile.conditions import parse_rfc3339
from finetune_operator.reconcile.decide import Cancel
from finetune_operator.reconcile.deleting import FOREGROUND, ORPHAN, decide_deletion

log = logging.getLogger(__name__)


class Finalizer:
    """Lets jobs go.

    Args:
        writer: For finalizers and deletions, and for what is told meanwhile.
        backends: Who ends attempts.
        observer: Who looks for attempts that may exist though nobody wrote that down.
        now: The time, with a zone.
    """

    def __init__(
        self,
        writer: StatusWriter,
        backends: Backends,
        observer: Observer,
        now: Callable[[], datetime],
    ) -> None:
        self._writer = writer
        self._backends = backends
        self._observer = observer
        self._now = now

    async def add(self, view: JobView) -> JobView:
        """Return the job with our finalizer; one that lives outside gets it before its attempt.

        Raises:
            StaleError: the job has changed.
        """
        if FINALIZER in view.finalizers:
            return view
        change = {"metadata": {"finalizers": [*view.finalizers, FINALIZER]}}
        return await self._writer.patch(view, change)

    async def finalize(self, view: JobView) -> Result:
        """Stop the attempt of a job that is deleted, say what keeps the job, and then let it go.

        Raises:
            StaleError: the job has changed.
            FineTuneError: the attempt cannot be ended; `retryable` says whether to try again.
        """
        has_ours = FINALIZER in view.finalizers
        if not view.finalizers or (ORPHAN in view.finalizers and not has_ours):
            return NEVER  # it goes without us, or its attempt shall stay
        view, result = await self._stop(view)
        if result.requeue_seconds is not None or not has_ours:
            return result
        rest = [one for one in view.finalizers if one != FINALIZER]
        await self._writer.patch(view, {"metadata": {"finalizers": rest}})
        log.info("finalizer removed", extra={"job": str(view.key)})
        return NEVER

    async def delete_when_due(self, view: JobView) -> Result:
        """Delete a finished job when `spec.ttlSecondsAfterFinished` is over.

        Raises:
            StaleError: the job has changed.
        """
        ttl_seconds, ended = view.job.spec.ttl_seconds_after_finished, view.status.completion_time
        if ttl_seconds is None or ended is None:
            return NEVER
        left = parse_rfc3339(ended) + timedelta(seconds=ttl_seconds) - self._now()
        if left.total_seconds() > 0:
            return Result(left.total_seconds())
        await self._writer.delete(view)
        log.info("deleted as ttlSecondsAfterFinished says", extra={"job": str(view.key)})
        return NEVER

    async def _stop(self, view: JobView) -> tuple[JobView, Result]:
        """Cancel the open attempt and tell of it; no requeue once it is gone."""
        last, backend, seen = await self._last_created(view), None, None
        ref = last.ref
        if last.attempt is not None and ref is not None:
            backend = self._backends.get(view.backend)
            seen = await backend.observe(ref)
        spec = view.job.spec if view.parsed is not None else None
        now, generation = self._now(), view.metadata.generation
        decision = decide_deletion(
            last.status, seen, view.finalizers, spec, now=now, generation=generation
        )
        is_news = is_worth_writing(view.written, decision.status, with_handle=True)
        if is_news and (decision.actions or set(view.finalizers) - {FINALIZER, FOREGROUND}):
            view = await self._writer.write(view, decision.status)
        order = next(iter(decision.actions), None)
        if backend is None or ref is None or not isinstance(order, Cancel):
            return view, NEVER
        await backend.cancel(ref, order.until)
        return view, Result(max(decision.requeue_seconds or 0.0, SHORTEST_WAIT_SECONDS))

    async def _last_created(self, view: JobView) -> JobView:
        """Return the job with its last attempt, also where nobody wrote down that it exists."""
        if view.parsed is None or view.handle is not None:
            return view
        is_free = self._backends.finds_from_cache(view.backend) is not False
        may_exist = view.attempt is not None or (not view.status.attempt and is_free)
        return await self._observer.find(view) if may_exist else view

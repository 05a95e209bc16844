"""What is seen of the open attempts of jobs, whoever created them."""

import logging
from collections.abc import Callable
from datetime import datetime

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.backends.base import Attempt, AttemptPhase, Observation, Obstacle
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import BackendError
from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.failing import Failing
from finetune_operator.kernel.jobs import JobIndex, JobView, PendingStatuses
from finetune_operator.kube.cache import Key
from finetune_operator.kube.errors import ApiError
from finetune_operator.planner.plan import Plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import Reason, parse_rfc3339

log = logging.getLogger(__name__)

OBSERVE_AGAIN_SECONDS = 1.0
"""When to observe again what could not be observed."""

_BACKOFF = Backoff(2 * OBSERVE_AGAIN_SECONDS, 30.0)
_LATE_SUBMIT_SECONDS = 5.0  # how often an attempt is searched for that may yet appear
_ABSENT = Observation(AttemptPhase.UNKNOWN, all_gone=True, message="nothing of it was created")


class Observer:
    """Finds and observes the open attempts of jobs.

    Args:
        backends: Who runs them.
        index: Who plans jobs.
        pending: Where handles are kept until a status holds them.
        note_opened: Notes that a job has opened an attempt; returns its status with its folders.
        now: The time, with a zone.
    """

    def __init__(
        self,
        backends: Backends,
        index: JobIndex,
        pending: PendingStatuses,
        note_opened: Callable[[Key, FineTuneJobStatus], FineTuneJobStatus],
        now: Callable[[], datetime],
    ) -> None:
        self._backends = backends
        self._index = index
        self._pending = pending
        self._note_opened = note_opened
        self._now = now
        self._failing = Failing(now)

    async def find_lost(self, view: JobView) -> JobView:
        """Return the job with the attempt that its status lacks, where one may exist.

        Raises:
            FineTuneError: that cannot be said.
        """
        is_open = view.attempt is not None
        is_unknown = not view.status.attempt or (is_open and view.handle is None)
        is_free = self._backends.finds_from_cache(view.backend)
        is_looked_for = is_free or (is_open and view.is_told_to_stop)
        return await self.find(view) if is_unknown and is_looked_for else view

    async def find(self, view: JobView) -> JobView:
        """Return the job with its newest attempt, or else its first, if that exists by its name.

        Raises:
            FineTuneError: that cannot be said.
        """
        number = view.status.attempt or 1
        found = await self._backends.of(view.job).find(view.job, Attempt(number))
        if found is None:
            return view
        if view.status.attempt:
            status = attempts.with_handle(view.status, found.handle)
        else:
            plan = self._index.plan(view.job)
            planned = plan if isinstance(plan, Plan) else None
            status = attempts.adopt(view.job, found, self._now(), planned)
            status = self._note_opened(view.key, status)
        self._pending.note_handle(view, number, found.handle)
        extra = {"job": str(view.key), "attempt": number, "handle": found.handle.name}
        log.info("attempt found", extra=extra)
        return view.with_status(status)

    async def observe(self, view: JobView) -> Observation | None:
        """Return what is seen of the open attempt; None where there is none, or nobody knows it.

        Raises:
            BackendError: it cannot be observed until somebody fixes the cause.
            ApiError: likewise.
        """
        if view.attempt is None:
            return None
        if (ref := view.ref) is None:
            return self.observe_absent(view) if view.is_told_to_stop else None
        try:
            seen = await self._backends.get(view.backend).observe(ref)
        except (BackendError, ApiError) as error:
            if not error.retryable:
                raise
            tries = self._failing.note(view.key)
            wait = _BACKOFF.seconds(tries) if tries else OBSERVE_AGAIN_SECONDS
            return Observation(
                AttemptPhase.UNKNOWN,
                obstacle=Obstacle(Reason.BACKEND_FAILED, str(error)) if tries else None,
                message=str(error),
                requeue_seconds=max(wait, error.retry_after or 0.0),
            )
        self._failing.forget(view.key)
        return seen

    def observe_absent(self, view: JobView) -> Observation:
        """Return what is seen of an open attempt that was to stop and is not found by its name.

        Where a submit may have been sent without an answer, it is gone once that cannot land any
        more.
        """
        attempt, limits = view.attempt, self._backends.get(view.backend).backend.limits
        if attempt is None or not limits.late_submit:
            return _ABSENT
        left = limits.late_submit + limits.submit
        if attempt.stop_deadline is not None:  # nothing is submitted after that was written
            left -= (self._now() - parse_rfc3339(attempt.stop_deadline)).total_seconds()
        if left <= 0:
            return _ABSENT
        again = min(max(left, OBSERVE_AGAIN_SECONDS), _LATE_SUBMIT_SECONDS)
        return Observation(AttemptPhase.UNKNOWN, requeue_seconds=again)

    def forget(self, key: Key) -> None:
        """Drop what is known of a job."""
        self._failing.forget(key)

"""Calls the verbs of a job's backend: find, observe, submit, cancel, collect.

A failed call is retried, and a failure that lasts is reported in the status.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.backends.base import (
    Attempt,
    AttemptPhase,
    Effect,
    Handle,
    Observation,
    Obstacle,
)
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import BackendError, FineTuneError
from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.informer import NotShown
from finetune_operator.kernel.jobs import JobIndex, JobView, unusable
from finetune_operator.kernel.ledgers import LedgerBook
from finetune_operator.kernel.status_writer import StatusWriter
from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.planner.plan import with_choice
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import Reason, parse_rfc3339
from finetune_operator.reconcile.decide import (
    Cancel,
    Collect,
    Decision,
    Rejection,
    decide,
)

log = logging.getLogger(__name__)

OBSERVE_AGAIN_SECONDS = 1.0
"""Delay before a failed observation of an attempt is repeated."""

_BACKOFF = Backoff(2 * OBSERVE_AGAIN_SECONDS, 30.0)
_LATE_SUBMIT_SECONDS = 5.0  # between searches for an attempt that may still be created
_ABSENT = Observation(AttemptPhase.UNKNOWN, all_gone=True, message="it was never created")

_STAYS = (
    "; the job stays until its attempt has ended. Fix that, or make sure that no part of the "
    f"attempt runs, and then remove the finalizer {FINALIZER}"
)

T = TypeVar("T")

_MAX_ARTIFACTS = 16


class Observer:
    """Finds and observes the open attempts of jobs.

    Args:
        backends: Backends of the jobs.
        ledgers: Time ledgers, which record the observed progress.
        now: The time, with a zone.
    """

    def __init__(
        self, backends: Backends, ledgers: LedgerBook, now: Callable[[], datetime]
    ) -> None:
        self._backends = backends
        self._ledgers = ledgers
        self._now = now

    async def find_unrecorded(self, view: JobView) -> JobView:
        """Return the job with the handle of its open attempt, if the status lacks the handle.

        Without a cache, a search costs requests. An attempt that has to run is then not searched
        for, but created again, which adopts an existing one.

        Raises:
            FineTuneError: It is unknown whether the attempt exists.
        """
        if view.attempt is None or view.handle is not None:
            return view
        if view.has_to_stop or self._backends.finds_from_cache(view.backend):
            return await self.find(view)
        return view

    async def find(self, view: JobView) -> JobView:
        """Return the job with the handle of its open attempt, if an attempt of its name exists.

        Raises:
            FineTuneError: It is unknown whether the attempt exists.
        """
        number = view.status.attempt
        found = await self._backends.of(view.job).find(view.job, Attempt(number))
        if found is None:
            return view
        view.memory.submitted = (number, found.handle)
        extra = {"job": str(view.key), "attempt": number, "handle": found.handle.name}
        log.info("attempt found", extra=extra)
        return view.with_status(attempts.with_handle(view.status, found.handle))

    async def observe(self, view: JobView) -> Observation | None:
        """Observe the open attempt; None if no attempt is open, or its handle is unknown.

        Raises:
            BackendError: The attempt cannot be observed until the cause is fixed.
            ApiError: Likewise.
        """
        if view.attempt is None:
            return None
        if (ref := view.ref) is None:
            return self.observe_absent(view) if view.has_to_stop else None
        try:
            seen = await self._backends.get(view.backend).observe(ref)
        except (BackendError, ApiError) as error:
            if not error.retryable:
                raise
            failures = view.memory.observing.record(self._now())
            wait = _BACKOFF.seconds(failures) if failures else OBSERVE_AGAIN_SECONDS
            return Observation(
                AttemptPhase.UNKNOWN,
                obstacle=Obstacle(Reason.BACKEND_FAILED, str(error)) if failures else None,
                message=str(error),
                requeue_seconds=max(wait, error.retry_after or 0.0),
            )
        view.memory.observing.reset()
        is_scraped = self._backends.pages_are_scraped(view.backend)
        self._ledgers.apply_report(view, seen, is_scraped=is_scraped)
        return seen

    def observe_absent(self, view: JobView) -> Observation:
        """Return the observation of an attempt that has to stop and is not found by its name.

        If its submit got no response, the attempt counts as gone only once that request can no
        longer take effect.
        """
        attempt, limits = view.attempt, self._backends.get(view.backend).backend.limits
        if attempt is None or not limits.late_submit:
            return _ABSENT
        left = limits.late_submit + limits.submit
        if attempt.stop_deadline is not None:  # no submit follows the write of the deadline
            left -= (self._now() - parse_rfc3339(attempt.stop_deadline)).total_seconds()
        if left <= 0:
            return _ABSENT
        again = min(max(left, OBSERVE_AGAIN_SECONDS), _LATE_SUBMIT_SECONDS)
        return Observation(AttemptPhase.UNKNOWN, requeue_seconds=again)


class Actions:
    """Acts on attempts, and reports failures that last.

    Args:
        backends: Backends of the jobs.
        index: Plans jobs.
        writer: Writes the status of a job whose action fails.
        now: The time, with a zone.
    """

    def __init__(
        self, backends: Backends, index: JobIndex, writer: StatusWriter, now: Callable[[], datetime]
    ) -> None:
        self._backends = backends
        self._index = index
        self._writer = writer
        self._now = now

    async def create(self, view: JobView, number: int) -> Handle:
        """Create the attempt with this number."""
        view.memory.forget_failures()  # recorded failures belong to the previous attempt
        plan = self._index.plan(view)
        if isinstance(plan, Rejection):
            raise BackendError(plan.message)
        plan = with_choice(plan, view.job.status.plan)
        backend = self._backends.of(view.job)
        return await backend.submit(backend.render(replace(plan, job=view.job), Attempt(number)))

    def record_failure(self, view: JobView, message: str, error: FineTuneError) -> bool:
        """Record a failed action; return whether it lasts long enough to be reported."""
        is_due = bool(view.memory.acting.record(self._now())) or not error.retryable
        if is_due:
            view.memory.obstacle = Obstacle(Reason.BACKEND_FAILED, message, Effect.STALLED)
        return is_due

    def with_recorded_failure(self, view: JobView, seen: Observation | None) -> Observation | None:
        """Add the recorded failure of a job to the observation of its attempt."""
        obstacle = view.memory.obstacle
        if obstacle is None or seen is None or seen.all_gone:
            return seen
        return replace(seen, obstacle=obstacle)

    async def collect(
        self, view: JobView, decision: Decision, seen: Observation | None
    ) -> FineTuneJobStatus:
        """Return the decided status, with the exported artifacts if they are to be collected."""
        ref, status = view.ref, decision.status
        if ref is None or seen is None or decision.action(Collect) is None:
            return status
        call = self._backends.of(view.job).collect(ref)
        uris = await self._reported(view, seen, "the exported artifacts cannot be collected", call)
        return status.model_copy(update={"artifacts": list(uris)[:_MAX_ARTIFACTS]})

    async def cancel(self, view: JobView, decision: Decision, seen: Observation | None) -> bool:
        """Cancel the attempt if that was decided; return whether all its parts are already gone.

        No event reports that: the backend caches the responses to its requests, so the same objects
        from the watch do not change it.
        """
        ref, order = view.ref, decision.action(Cancel)
        if ref is None or seen is None or order is None:
            return False
        backend = self._backends.of(view.job)
        problem = f"attempt {ref.number} cannot be cancelled and still runs"
        await self._reported(view, seen, problem, backend.cancel(ref, order.until))
        return (await backend.observe(ref)).all_gone

    async def _reported(
        self, view: JobView, seen: Observation, problem: str, call: Awaitable[T]
    ) -> T:
        """Await a call of the backend; report its failure in the status if the failure lasts.

        Raises:
            FineTuneError: The call has failed.
        """
        try:
            result = await call
        except FineTuneError as error:
            if self.record_failure(view, f"{problem}: {error}", error):
                stuck = self.with_recorded_failure(view, replace(seen, all_gone=False))
                decided = decide(view.job, stuck, self._now(), self._index.plan(view))
                await self._writer.report(view, decided.status)
            raise
        view.memory.forget_failures()
        return result


def unseen(view: JobView, missing: NotShown) -> Rejection:
    """Return the rejection of a job whose children the API server does not show."""
    text = (
        f"spec.backend.type {view.backend}: the operator cannot see what runs in this namespace "
        f"({missing.message}); {missing.remedy}{_STAYS if view.is_deleted else ''}"
    )
    return Rejection(Reason.BACKEND_FAILED, text)


def unreadable(view: JobView, error: FineTuneError) -> Rejection:
    """Log that an attempt cannot be observed, and return the rejection."""
    log.warning("attempt cannot be observed", extra={"job": str(view.key), "error": error})
    return unusable(error)


def deletion_blocked(error: FineTuneError) -> Rejection:
    """Return the rejection of a deleted job whose attempt cannot be ended."""
    return unusable(error, _STAYS)

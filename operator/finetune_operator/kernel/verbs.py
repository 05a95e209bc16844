"""A backend's verbs as the kernel asks for them: find, observe, submit, cancel, collect.

What fails for longer than a moment is reported in the status, and tried again.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
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
from finetune_operator.errors import BackendError, FineTuneError, UnknownBackendError
from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.informer import NotShown
from finetune_operator.kernel.jobs import JobIndex, JobView, PendingStatuses
from finetune_operator.kernel.ledgers import LedgerBook
from finetune_operator.kernel.status_writer import StatusWriter
from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.planner.plan import Plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import Reason, parse_rfc3339
from finetune_operator.reconcile.decide import (
    PATIENCE_SECONDS,
    Cancel,
    Collect,
    Decision,
    Rejection,
    decide,
)

log = logging.getLogger(__name__)

OBSERVE_AGAIN_SECONDS = 1.0
"""When to observe again what could not be observed."""

_BACKOFF = Backoff(2 * OBSERVE_AGAIN_SECONDS, 30.0)
_LATE_SUBMIT_SECONDS = 5.0  # how often an attempt is searched for that may yet appear
_ABSENT = Observation(AttemptPhase.UNKNOWN, all_gone=True, message="nothing of it was created")

_STAYS = (
    "; the job stays until its attempt has ended. Fix that, or make sure that nothing of the "
    f"attempt runs, and then remove the finalizer {FINALIZER}"
)

T = TypeVar("T")

_MAX_ARTIFACTS = 16


class Failing:
    """Failures in a row, by job.

    Args:
        now: The time, with a zone.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._since: dict[Key, tuple[datetime, int]] = {}

    def note(self, key: Key) -> int:
        """Note a failure; return how many there were after the first `PATIENCE_SECONDS`."""
        since, tries = self._since.get(key, (self._now(), 0))
        tries += self._now() - since >= timedelta(seconds=PATIENCE_SECONDS)
        self._since[key] = (since, tries)
        return tries

    def forget(self, key: Key) -> None:
        """Note a success, or that the job is over."""
        self._since.pop(key, None)


class Observer:
    """Finds and observes the open attempts of jobs.

    Args:
        backends: Who runs them.
        index: Who plans jobs.
        pending: Where handles are kept until a status holds them.
        note_opened: Notes that a job has opened an attempt; returns its status with its folders.
        ledgers: Who keeps account of what is seen.
        now: The time, with a zone.
    """

    def __init__(
        self,
        backends: Backends,
        index: JobIndex,
        pending: PendingStatuses,
        note_opened: Callable[[Key, FineTuneJobStatus], FineTuneJobStatus],
        ledgers: LedgerBook,
        now: Callable[[], datetime],
    ) -> None:
        self._backends = backends
        self._index = index
        self._pending = pending
        self._note_opened = note_opened
        self._ledgers = ledgers
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
        is_scraped = self._backends.pages_are_scraped(view.backend)
        self._ledgers.hear(view, seen, is_scraped=is_scraped)
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


class Actions:
    """Acts on attempts.

    Args:
        backends: Who carries it out.
        index: Who plans jobs.
        writer: For what fails.
        now: The time, with a zone.
    """

    def __init__(
        self, backends: Backends, index: JobIndex, writer: StatusWriter, now: Callable[[], datetime]
    ) -> None:
        self._backends = backends
        self._index = index
        self._writer = writer
        self._now = now
        self._failing = Failing(now)
        self._obstacles: dict[Key, Obstacle] = {}

    async def create(self, view: JobView, number: int) -> Handle:
        """Create the attempt of that number."""
        self.forget(view.key)  # what has failed was about the attempt before
        plan = self._index.plan(view.job)
        if isinstance(plan, Rejection):
            raise BackendError(plan.message)
        backend = self._backends.of(view.job)
        return await backend.submit(backend.render(replace(plan, job=view.job), Attempt(number)))

    def obstruct(self, key: Key, message: str, error: FineTuneError) -> bool:
        """Note what fails for a job; return whether to report that by now."""
        is_due = bool(self._failing.note(key)) or not error.retryable
        if is_due:
            self._obstacles[key] = Obstacle(Reason.BACKEND_FAILED, message, Effect.STALLED)
        return is_due

    def hinder(self, view: JobView, seen: Observation | None) -> Observation | None:
        """Add what fails for a job to what is seen of its attempt."""
        obstacle = self._obstacles.get(view.key)
        if obstacle is None or seen is None or seen.all_gone:
            return seen
        return replace(seen, obstacle=obstacle)

    async def collect(
        self, view: JobView, decision: Decision, seen: Observation | None
    ) -> FineTuneJobStatus:
        """Return the status that was decided, with what was exported where that is to be asked."""
        ref, status = view.ref, decision.status
        if ref is None or seen is None or decision.action(Collect) is None:
            return status
        asked = self._backends.of(view.job).collect(ref)
        found = await self._reported(view, seen, "what it exported cannot be collected", asked)
        return status.model_copy(update={"artifacts": list(found)[:_MAX_ARTIFACTS]})

    async def cancel(self, view: JobView, decision: Decision, seen: Observation | None) -> bool:
        """Cancel the attempt where that was decided; return whether nothing of it is left by now.

        No event would say so: what a backend's own answers have put into its cache is not new any
        more when the watch brings it.
        """
        ref, order = view.ref, decision.action(Cancel)
        if ref is None or seen is None or order is None:
            return False
        backend = self._backends.of(view.job)
        what = f"attempt {ref.number} cannot be told to stop, and runs on"
        await self._reported(view, seen, what, backend.cancel(ref, order.until))
        return (await backend.observe(ref)).all_gone

    def forget(self, key: Key) -> None:
        """Drop what is known of a job."""
        self._failing.forget(key)
        self._obstacles.pop(key, None)

    async def _reported(
        self, view: JobView, seen: Observation, what: str, asked: Awaitable[T]
    ) -> T:
        """Return the answer; where there is none for a while, the status says so.

        Raises:
            FineTuneError: there is no answer.
        """
        try:
            answer = await asked
        except FineTuneError as error:
            if self.obstruct(view.key, f"{what}: {error}", error):
                stuck = self.hinder(view, replace(seen, all_gone=False))
                decided = decide(view.job, stuck, self._now(), self._index.plan(view.job))
                await self._writer.report(view, decided.status)
            raise
        self.forget(view.key)
        return answer


def unseen(view: JobView, missing: NotShown) -> Rejection:
    """Return that the API server does not show what runs for a job."""
    text = (
        f"spec.backend.type {view.backend}: the operator cannot see what runs in this namespace "
        f"({missing.message}); {missing.cure}{_STAYS if view.is_deleted else ''}"
    )
    return Rejection(Reason.BACKEND_FAILED, text)


def unreadable(view: JobView, error: FineTuneError) -> Rejection:
    """Return why an attempt cannot be observed, and log it."""
    log.warning("attempt cannot be observed", extra={"job": str(view.key), "error": error})
    return Rejection(_reason_of(error), str(error))


def endless(error: FineTuneError) -> Rejection:
    """Return why a job that is deleted stays."""
    return Rejection(_reason_of(error), f"{error}{_STAYS}")


def _reason_of(error: FineTuneError) -> Reason:
    is_missing = isinstance(error, UnknownBackendError)
    return Reason.BACKEND_NOT_FOUND if is_missing else Reason.BACKEND_FAILED

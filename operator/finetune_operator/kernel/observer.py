"""What is known of a job's open attempt: found by its name, and seen through its backend.

`Reconciler` and `Finalizer` ask. Nothing here decides or writes.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from finetune_operator.backends.base import Attempt, AttemptPhase, Observation
from finetune_operator.errors import BackendError
from finetune_operator.kernel.folders import FolderBook
from finetune_operator.kernel.jobs import Backends, JobBook, JobView, PendingStatuses
from finetune_operator.kube.cache import Key
from finetune_operator.kube.errors import ApiError
from finetune_operator.planner.plan import Plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import ConditionType, Reason, is_finished, is_true
from finetune_operator.reconcile.decide import PATIENCE_SECONDS

log = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 1.0
"""When to look again at what could not be seen."""

_ABSENT = Observation(AttemptPhase.UNKNOWN, all_gone=True, message="nothing of it was created")


class Observer:
    """Finds and observes the open attempts of jobs.

    Args:
        backends: Who runs them.
        book: Who plans jobs.
        folders: Who notes which folders an attempt has that was found.
        pending: Where handles are kept until a status holds them.
        now: The time, with a zone.
    """

    def __init__(
        self,
        backends: Backends,
        book: JobBook,
        folders: FolderBook,
        pending: PendingStatuses,
        now: Callable[[], datetime],
    ) -> None:
        self._backends = backends
        self._book = book
        self._folders = folders
        self._pending = pending
        self._now = now
        self._unseen: dict[Key, datetime] = {}  # since when looks at their attempts have failed

    async def find_lost(self, view: JobView) -> JobView:
        """Return the job with the attempt that its status does not tell of, where one may be.

        Raises:
            FineTuneError: that cannot be said.
        """
        is_open = view.attempt is not None
        is_unknown = not view.status.attempt or (is_open and view.handle is None)
        is_told_to_stop = _is_or_was_suspended(view) or is_finished(view.status)
        is_inside = self._backends.live_in_cluster(view.backend)
        is_looked_for = is_inside or (is_open and is_told_to_stop)
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
            plan = self._book.plan(view.job)
            planned = plan if isinstance(plan, Plan) else None
            status = attempts.adopt(view.job, found, self._now(), planned)
            status = self._folders.opened(view.key, status)
        self._pending.note_handle(view, number, found.handle)
        extra = {"job": str(view.key), "attempt": number, "handle": found.handle.name}
        log.info("attempt found", extra=extra)
        return view.with_status(status)

    async def observe(self, view: JobView) -> Observation | None:
        """Return what is seen of the open attempt; None where there is none, or nobody knows it.

        Raises:
            BackendError: it cannot be seen until somebody mends the cause.
            ApiError: likewise.
        """
        if view.attempt is None:
            return None
        if (handle := view.handle) is None:
            return _ABSENT if _is_or_was_suspended(view) else None  # it was looked for by its name
        try:
            seen = await self._backends.of(view.job).observe(handle)
        except (BackendError, ApiError) as error:
            if not error.retryable:
                raise
            since = self._unseen.setdefault(view.key, self._now())
            lasts = self._now() - since >= timedelta(seconds=PATIENCE_SECONDS)
            return Observation(
                AttemptPhase.UNKNOWN,
                reason=Reason.BACKEND_FAILED if lasts else "",
                message=str(error),
                look_again_seconds=LOOK_AGAIN_SECONDS,
            )
        self._unseen.pop(view.key, None)
        return seen

    def forget(self, key: Key) -> None:
        """Drop what is known of a job."""
        self._unseen.pop(key, None)


def _is_or_was_suspended(view: JobView) -> bool:
    """Say whether a job is told to be suspended, or was when it was written about last."""
    return view.job.spec.suspend or is_true(view.status, ConditionType.SUSPENDED)

"""Writes the status of a job where that is due, and posts the Events that go with it.

`Reconciler` and `Finalizer` decide what is said; when it is written, `reports` says.
"""

import logging
from collections.abc import Callable
from datetime import datetime

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.kernel.events import EventPoster, events_between
from finetune_operator.kernel.jobs import Backends, JobBook, JobView, PendingStatuses
from finetune_operator.kernel.reports import NO_DELAY, Delay, Reports
from finetune_operator.kernel.watches import trim_metadata
from finetune_operator.kernel.writes import is_worth_writing, status_patch
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.errors import ConflictError, NotFoundError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object
from finetune_operator.reconcile.conditions import parse_rfc3339

log = logging.getLogger(__name__)


class StaleError(Exception):
    """The object is not the one that was looked at any more."""


class StatusWriter:
    """Writes to FineTuneJobs, each time to exactly the object that was looked at.

    Args:
        client: Who writes.
        cache: The FineTuneJobs; answers to writes are put into it.
        book: Who reads them.
        pending: What no status holds yet.
        backends: Who knows where attempts live.
        events: Who tells people.
        now: The time, with a zone.
        is_busy: Whether other jobs are to be looked at, which comes before reporting.
    """

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        book: JobBook,
        pending: PendingStatuses,
        backends: Backends,
        events: EventPoster,
        *,
        now: Callable[[], datetime],
        is_busy: Callable[[], bool],
    ) -> None:
        self._client = client
        self._cache = cache
        self._book = book
        self._pending = pending
        self._backends = backends
        self._events = events
        self._now = now
        self._is_busy = is_busy
        self._reports = Reports()

    async def report(self, view: JobView, status: FineTuneJobStatus) -> tuple[JobView, Delay]:
        """Write the status if that is worth a write, unless that can wait.

        Returns:
            The job with that status, and how long its write may wait.

        Raises:
            StaleError: the job has changed.
        """
        with_handle = view.parsed is not None and self._backends.live_outside(view.backend)
        if not is_worth_writing(view.written, status, with_handle=with_handle):
            return view.with_status(status), NO_DELAY
        delay = self._reports.delay(
            view.key,
            view.written,
            status,
            self._now(),
            created=parse_rfc3339(view.raw["metadata"]["creationTimestamp"]),
            with_handle=with_handle,
            is_busy=self._is_busy(),
        )
        if not delay:
            return await self.write(view, status), NO_DELAY
        if status.attempt and not view.written.attempt:
            self._pending.note_opened(view, status)
        return view.with_status(status), delay

    async def write(self, view: JobView, status: FineTuneJobStatus) -> JobView:
        """Write the status, and tell what has become true by it.

        Raises:
            StaleError: the job has changed.
        """
        change = status_patch(view.written, status)
        written = await self.patch(view, {"status": change}, is_status=True)
        phase, attempt = status.phase.value, status.attempt
        log.info("status written", extra={"job": str(view.key), "phase": phase, "attempt": attempt})
        self._pending.note_written(view.key)
        self._reports.note(view.key, status, self._now())
        for event in events_between(view.written, status):
            await self._events.post(view.metadata, event)
        return written.with_status(status)

    async def patch(self, view: JobView, change: Object, *, is_status: bool = False) -> JobView:
        """Patch exactly the object that was looked at; another look follows if it has changed.

        Raises:
            StaleError: it has changed.
        """
        metadata = view.raw["metadata"]
        exactly = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        patch = {**change, "metadata": {**change.get("metadata", {}), **exactly}}
        try:
            made = await self._client.patch(
                FINE_TUNE_JOBS,
                view.key.name,
                view.key.namespace,
                patch,
                subresource="status" if is_status else None,
            )
        except (ConflictError, NotFoundError) as error:
            raise StaleError from error
        self._cache.put(trim_metadata(made))
        return self._book.get(view.key) or view

    async def read_again(self, key: Key) -> None:
        """Bring the cache up to date: the watch is behind what we were just told."""
        try:
            made = await self._client.get(FINE_TUNE_JOBS, key.name, key.namespace)
        except NotFoundError:
            if (there := self._cache.get(key)) is not None:
                self._cache.remove(there)
        else:
            self._cache.put(trim_metadata(made))

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is over."""
        self._reports.forget(key)

"""A leader term: caches, watches, queue and workers, from the first list to the end.

All objects are created again for each term, so that no state of an earlier term is used.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import EntryPoint
from pathlib import Path

from finetune_operator.api.v1alpha1.topology import backend_name
from finetune_operator.backends import registry
from finetune_operator.backends.base import AttemptRef, Backend, BackendContext, Observation
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.events import EventPoster
from finetune_operator.kernel.health import Health
from finetune_operator.kernel.informer import Informer
from finetune_operator.kernel.informers import Informers, Place
from finetune_operator.kernel.job_events import JobEvents, ListenOptions, OnEvent
from finetune_operator.kernel.ledgers import LedgerBook
from finetune_operator.kernel.queue import WorkQueue
from finetune_operator.kernel.reconciler import Reconciler
from finetune_operator.kernel.resync import Resync
from finetune_operator.kernel.settings import Settings
from finetune_operator.kube.api_errors import InvalidError
from finetune_operator.kube.cache import Key, ObjectCache, key_of
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.packed_jobs import pack
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object, Resource
from finetune_operator.kube.watch import Watch
from finetune_operator.metrics import catalogue
from finetune_operator.metrics.counts import Counts
from finetune_operator.metrics.page import QueueNow, Snapshot
from finetune_operator.reconcile.conditions import ConditionType

log = logging.getLogger(__name__)

_COALESCE_SECONDS = 0.25
# The API server refuses every write to a stored object that a newer definition does not accept; a
# change of the object is reconciled at once.
_INVALID_SECONDS = 600.0
_SPARE_WORKERS = 4  # for other backends while one backend keeps its whole share of workers busy
_LASTING_SECONDS = 60.0  # kopf did not fail at its start if it ran for longer
# With this longest wait, recovery after an outage takes at most 15 s.
_WATCH_BACKOFF = Backoff(0.5, 10.0)


def listen_by_kopf(client: KubeClient, options: ListenOptions, on_event: OnEvent) -> JobEvents:
    """Return kopf as the source of events of FineTuneJobs."""
    from finetune_operator.kernel.kopf_events import KopfThread  # ftctl run does not need kopf
    from finetune_operator.kube.http import HttpClient

    assert isinstance(client, HttpClient), "kopf asks over HTTP"
    return KopfThread(client.access, options, on_event)


class LeaderTerm:
    """Runs all parts of the operator while this process leads.

    Args:
        client: Access to the cluster.
        settings: Settings of the process.
        backends: Backends by name; by default the backends of installed packages.
        folder: Base of `file://./x` in a manifest; by default the current folder.
        listen: Returns a source of events of FineTuneJobs, which is used until it ends.
        now: The time, with a zone.
        counts: Counters of the process, for all its terms.
        on_refused: Called when the API server begins to refuse FineTuneJobs.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: Settings,
        *,
        backends: Mapping[str, Backend | type[Backend]] | None = None,
        folder: Path | None = None,
        listen: Callable[[KubeClient, ListenOptions, OnEvent], JobEvents] = listen_by_kopf,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        counts: Counts | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._counts = Counts() if counts is None else counts
        self._ledgers = LedgerBook(self._counts, now)
        self._settings = settings
        self._listen = listen
        self._caches: dict[Resource, ObjectCache] = {}
        self._jobs = self._cache(FINE_TUNE_JOBS)
        retries = Backoff(settings.retry_seconds, settings.max_retry_seconds)
        self._queue = WorkQueue(
            retries,
            _COALESCE_SECONDS,
            is_urgent=lambda key: self._reconciler.is_new(key),
            group_of=self._backend_of,
            share=settings.workers,
        )
        self._cluster = Cluster(client, self._cache, settings.namespaces)
        context = BackendContext(folder or Path.cwd(), dict(os.environ), self._cluster, now=now)
        self._backends = Backends(context, _points(settings), backends, wake=self._queue.add)
        self._resync = Resync(
            client,
            self._jobs,
            namespaces=settings.namespaces,
            resync_seconds=settings.resync_seconds,
            backoff=_WATCH_BACKOFF,
            wake=self._queue.add,
            on_served=self._restart_kopf,
            on_refused=on_refused,
        )
        self._informers = Informers(settings.namespaces, self._informer)
        self._events: JobEvents | None = None
        self._loop = asyncio.get_running_loop()
        self._jobs_asked_at = self._loop.time()
        self._is_synced = False
        self._backlog: set[Key] = set()
        self._reconciler = Reconciler(
            client,
            self._jobs,
            self._backends,
            EventPoster(client, settings.identity),
            now=now,
            not_shown=self._informers.not_shown_to,
            wake=self._queue.add,
            ledgers=self._ledgers,
        )

    async def observe(self, backend: str, ref: AttemptRef) -> Observation:
        """Observe an attempt outside the workers, for a live display."""
        return await self._backends.get(backend).observe(ref)

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            found = await self._backends.load_all()
            self._informers.add(found)
            for backend in found:
                self._counts.add(catalogue.RECONCILE_ERRORS, backend, amount=0)
                self._counts.prepare(catalogue.RECONCILE_DURATION, backend)
                self._ledgers.prepare(backend)
            async with asyncio.TaskGroup() as group:
                for informer in self._informers.all:
                    group.create_task(informer.run())
                group.create_task(self._run_kopf())
                await self._resync.list_all()
                await self._informers.wait_until_synced()
                self._is_synced = True
                self._backlog.update(key_of(job) for job in self._jobs)
                log.info("synced", extra={"jobs": len(self._jobs)})
                group.create_task(self._resync.run())
                for _ in range(self._settings.workers + _SPARE_WORKERS):
                    group.create_task(self._work())
        finally:
            self._queue.close()
            await self._backends.close()

    def health(self) -> Health:
        """Return the state of this term."""
        silence = max(self._silence_of_jobs(), self._resync.late_seconds)
        silent = {**self._informers.silent_seconds(), str(FINE_TUNE_JOBS): silence}
        return Health(
            is_leading=True,
            is_ready=self._is_synced and not self._resync.is_blind,
            queue=len(self._queue),
            backlog=len(self._backlog),
            oldest_seconds=self._queue.oldest_seconds,
            silent_seconds=silent,
            refused={**self._resync.forbidden(), **self._informers.forbidden()},
            absent={**self._resync.absent(), **self._informers.absent()},
        )

    def snapshot(self) -> Snapshot:
        """Return the content of the metrics page."""
        queue = QueueNow(len(self._queue), self._queue.oldest_seconds, len(self._backlog))
        jobs = list(self._reconciler.jobs_now())
        return Snapshot(counts=self._counts, queue=queue, jobs=jobs)

    def _silence_of_jobs(self) -> float:
        """Return the time since the last watch or list of FineTuneJobs was requested.

        The time continues to run when the source of events is replaced. While the API server does
        not serve the kind, only lists request it.
        """
        asked = self._events.asked_at() if self._events else None
        if asked is None and self._resync.absent():
            asked = self._resync.listed_at
        self._jobs_asked_at = max(self._jobs_asked_at, asked or 0.0)
        return self._loop.time() - self._jobs_asked_at

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            backend, began = self._backend_of(key), self._loop.time()
            try:
                result = await self._reconciler.reconcile(key)
            except FineTuneError as error:
                is_invalid = isinstance(error, InvalidError)
                seconds = _INVALID_SECONDS if is_invalid else error.retry_after or 0.0
                wait = self._queue.add_rate_limited(key, seconds, is_requested=not is_invalid)
                self._counts.add(catalogue.RECONCILE_ERRORS, backend)
                log.warning("reconcile failed", extra=_failure(key, error, wait))
            except Exception as error:
                # A bug that one job triggers must not end the work on the others.
                wait = self._queue.add_rate_limited(key)
                self._counts.add(catalogue.RECONCILE_ERRORS, backend)
                log.exception(
                    "reconcile raised an unexpected error", extra=_failure(key, error, wait)
                )
            else:
                self._queue.done(key, result.requeue_seconds)
            seconds = self._loop.time() - began
            self._counts.observe(catalogue.RECONCILE_DURATION, backend, value=seconds)
            self._catch_up(key)

    def _catch_up(self, key: Key) -> None:
        """Remove a reconciled job from the backlog of jobs that existed when this term began."""
        if key in self._backlog:
            self._backlog.discard(key)
            if not self._backlog:
                log.info("backlog reconciled")

    async def _run_kopf(self) -> None:
        """Run kopf, and start it again whenever it ends."""
        failures = 0
        while True:
            options = ListenOptions(
                self._settings.namespaces, _WATCH_BACKOFF, self._settings.request_seconds
            )
            events = self._listen(self._client, options, self._on_event)
            self._events = events
            since = self._loop.time()
            events.start()
            try:
                await events.ended()
            finally:
                self._silence_of_jobs()
                self._events = None
                events.stop()
            failures = 1 if self._loop.time() - since > _LASTING_SECONDS else failures + 1
            log.warning("kopf ended; it starts again")
            await asyncio.sleep(_WATCH_BACKOFF.seconds(failures))
            # kopf searches for the kind only when it starts, so the kind must be served by then.
            await self._resync.list_again()

    def _restart_kopf(self) -> None:
        """Restart kopf, so that it searches for the kind again."""
        if self._events is not None:
            self._events.stop()

    def _on_event(self, kind: str | None, obj: Object | None) -> None:
        if obj is not None:
            job = pack(obj)
            changed = self._jobs.remove(job) if kind == "DELETED" else self._jobs.put(job)
            if changed:
                self._queue.add(key_of(job))
        if obj is None or (kind is None and self._is_synced):
            # After missed events the source lists again, which does not show deletions.
            self._resync.missed_events.set()

    def _backend_of(self, key: Key) -> str:
        """Return the name of a job's backend; empty if it is not registered."""
        job = self._jobs.get(key)
        name = backend_name(job["spec"].get("backend")) if job else ""
        return name if name in self._backends else ""

    def wake(self, key: Key | None) -> None:
        """Requeue the job whose child has changed; None requeues all jobs that may be unblocked.

        These are the stalled jobs, and the jobs whose newest spec has no status yet: a reconcile
        in progress may have read the objects before they changed.
        """
        if key is not None:
            self._queue.add(key)
            return
        stalled = (ConditionType.STALLED, "True")
        for job in self._jobs:
            status = job.get("status", {})
            is_reported = status.get("observedGeneration") == job["metadata"]["generation"]
            conditions = status.get("conditions", ())
            if not is_reported or any((c["type"], c["status"]) == stalled for c in conditions):
                self._queue.add(key_of(job))

    def _informer(self, watch: Watch, place: Place, used_by: str) -> Informer:
        return Informer(
            self._client,
            watch,
            self._cache(watch.resource),
            wake=self.wake,
            on_missed_events=self._resync.missed_events.set,
            namespace=place,
            backoff=_WATCH_BACKOFF,
            used_by=used_by,
        )

    def _cache(self, resource: Resource) -> ObjectCache:
        return self._caches.setdefault(resource, ObjectCache(resource))


def _points(settings: Settings) -> list[EntryPoint]:
    """Return the entry points that `settings.backends` names as NAME=MODULE:CLASS."""
    pairs = (job.partition("=") for job in settings.backends)
    return [EntryPoint(name, value, registry.GROUP) for name, _, value in pairs]


def _failure(key: Key, error: Exception, wait: float) -> dict[str, object]:
    message = str(error) or type(error).__name__
    return {"job": str(key), "error": message, "requeue_seconds": round(wait, 2)}

"""One term of leading: caches, watches, queue and workers, from the first list to the end.

Everything is made anew for each term, so nothing that was true in an earlier one is believed.
"""

import asyncio
import logging
import os
import random
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import EntryPoint

from finetune_operator.backends import registry
from finetune_operator.backends.base import BackendContext
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.events import EventPoster
from finetune_operator.kernel.handlers import JobEvents, KopfOptions, KopfThread, OnEvent
from finetune_operator.kernel.health import Health
from finetune_operator.kernel.jobs import Backends
from finetune_operator.kernel.queue import WorkQueue
from finetune_operator.kernel.reconciler import Reconciler
from finetune_operator.kernel.settings import Settings
from finetune_operator.kernel.surroundings import Surroundings
from finetune_operator.kernel.watches import WATCHED, KindWatch, Watched, trim_metadata
from finetune_operator.kube.cache import Key, ObjectCache, key_of
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.errors import ApiError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object, Resource
from finetune_operator.reconcile.conditions import ConditionType

log = logging.getLogger(__name__)

_REST_SECONDS = 0.25
_SETTLE_SECONDS = 1.0  # one LIST for all the gaps that one outage makes
# The longest wait and the settling after it keep the promise that 15 s after an outage all is seen.
_WATCH_BACKOFF = Backoff(0.5, 10.0)


def listen_by_kopf(client: KubeClient, options: KopfOptions, on_event: OnEvent) -> JobEvents:
    """Return what tells of FineTuneJobs, by kopf."""
    return KopfThread(client.access, options, on_event)


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Term:
    """All that works while this process leads.

    Args:
        client: Access to the cluster.
        settings: Settings of the process.
        surroundings: Where it runs.
        listen: Makes what tells of FineTuneJobs; each serves until it ends.
        now: The time, with a zone.
    """

    def __init__(
        self,
        client: KubeClient,
        settings: Settings,
        surroundings: Surroundings | None = None,
        *,
        listen: Callable[[KubeClient, KopfOptions, OnEvent], JobEvents] = listen_by_kopf,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._client = client
        self._settings = settings
        self._surroundings = surroundings or Surroundings()
        self._listen = listen
        self._caches: dict[Resource, ObjectCache] = {}
        self._jobs = self._cache(FINE_TUNE_JOBS)
        self._gap = asyncio.Event()
        self._listed_at = asyncio.get_running_loop().time()
        retries = Backoff(settings.retry_seconds, settings.max_retry_seconds)
        self._queue = WorkQueue(retries, _REST_SECONDS)
        self._backends = Backends(self._context(), _points(settings), self._surroundings.backends)
        self._watches = self._make_watches()
        self._is_synced = False
        self._reconciler = Reconciler(
            client,
            self._jobs,
            self._backends,
            EventPoster(client, settings.identity),
            now=now,
        )

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for watch in self._watches:
                    group.create_task(watch.run())
                group.create_task(self._run_kopf())
                await self._list_jobs_until_done()
                for watch in self._watches:
                    await watch.is_synced.wait()
                self._is_synced = True
                log.info("synced", extra={"jobs": len(self._jobs)})
                group.create_task(self._resync())
                for _ in range(self._settings.workers):
                    group.create_task(self._work())
        finally:
            self._queue.close()

    def health(self) -> Health:
        """Return how it goes."""
        now = asyncio.get_running_loop().time()
        silent = {
            f"{watch.watched.resource} {watch.namespace or ''}".strip(): now - watch.heard_at
            for watch in self._watches
        }
        # What kopf hears is no measure, as nothing may happen; that the lists go on is.
        late = now - self._listed_at - self._settings.resync_seconds
        silent[str(FINE_TUNE_JOBS)] = max(0.0, late)
        return Health(
            is_leading=True,
            is_ready=self._is_synced,
            queue=len(self._queue),
            oldest_seconds=self._queue.oldest_seconds,
            silent_seconds=silent,
        )

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            try:
                look = await self._reconciler.reconcile(key)
            except FineTuneError as error:
                asked = error.retry_after if isinstance(error, ApiError) else None
                wait = self._queue.failed(key, asked or 0.0)
                log.warning("look failed", extra=_failure(key, error, wait))
            except Exception as error:
                # A fault of ours in one job must not end the work on all others.
                wait = self._queue.failed(key)
                log.exception("look broke off", extra=_failure(key, error, wait))
            else:
                self._queue.done(key, look.again_in_seconds)

    async def _run_kopf(self) -> None:
        """Keep kopf running: what it cannot bear is followed by another try."""
        failures = 0
        while True:
            options = KopfOptions(
                self._settings.namespaces, _WATCH_BACKOFF, self._settings.request_seconds
            )
            events = self._listen(self._client, options, self._on_event)
            events.start()
            try:
                await events.ended()
            finally:
                events.stop()
            failures += 1
            log.warning("kopf ended; it starts again")
            await asyncio.sleep(_WATCH_BACKOFF.seconds(failures))
            self._gap.set()

    def _on_event(self, kind: str | None, made: Object) -> None:
        kept = trim_metadata(made)
        changed = self._jobs.remove(kept) if kind == "DELETED" else self._jobs.put(kept)
        if changed:
            self._queue.add(key_of(kept))
        if kind is None and self._is_synced:
            self._gap.set()  # kopf lists after a gap, and says nothing of what was deleted in it

    async def _list_jobs_until_done(self) -> None:
        failures = 0
        while True:
            try:
                return await self._list_jobs()
            except ApiError as error:
                failures += 1
                self._listed_at = asyncio.get_running_loop().time()
                log.warning("FineTuneJobs cannot be listed", extra={"error": str(error)})
                await asyncio.sleep(_WATCH_BACKOFF.seconds(failures))

    async def _list_jobs(self) -> None:
        """Correct the cache by a full list and look at every job."""
        for namespace in self._settings.namespaces or (None,):
            listing = await self._client.list(FINE_TUNE_JOBS, namespace, trim=trim_metadata)
            gone = self._jobs.replace(listing.items, listing.resource_version, namespace)
            for one in (*gone, *listing.items):
                self._queue.add(key_of(one))
        self._listed_at = asyncio.get_running_loop().time()

    async def _resync(self) -> None:
        while True:
            wait = self._settings.resync_seconds * random.uniform(0.8, 1.0)
            try:
                async with asyncio.timeout(wait):
                    await self._gap.wait()
            except TimeoutError:
                log.debug("time for a full list")
            await asyncio.sleep(_SETTLE_SECONDS)
            self._gap.clear()
            await self._list_jobs_until_done()

    def _wake(self, key: Key | None) -> None:
        """Wake the job whose child changed; or all that wait for somebody to mend something."""
        if key is not None:
            self._queue.add(key)
            return
        for one in self._jobs:
            conditions = one.get("status", {}).get("conditions", ())
            if any(_is_stalled(condition) for condition in conditions):
                self._queue.add(key_of(one))

    def _make_watches(self) -> list[KindWatch]:
        wanted: dict[str, Watched] = {}
        for name, backend in self._backends.load_all().items():
            if isinstance(backend, FineTuneError):
                log.error("backend left out", extra={"backend": name, "error": str(backend)})
                continue
            for kind in backend.watches:
                if kind in WATCHED:
                    wanted[kind] = WATCHED[kind]
                else:
                    log.error("kind cannot be watched", extra={"backend": name, "kind": kind})
        return [
            KindWatch(
                self._client,
                watched,
                self._cache(watched.resource),
                wake=self._wake,
                on_gap=self._gap.set,
                namespace=namespace,
                backoff=_WATCH_BACKOFF,
            )
            for watched in wanted.values()
            for namespace in self._places(watched.resource)
        ]

    def _places(self, resource: Resource) -> tuple[str | None, ...]:
        return (
            self._settings.namespaces
            if resource.namespaced and self._settings.namespaces
            else (None,)
        )

    def _context(self) -> BackendContext:
        cluster = Cluster(self._client, self._cache, self._settings.namespaces)
        return BackendContext(self._surroundings.folder, dict(os.environ), cluster)

    def _cache(self, resource: Resource) -> ObjectCache:
        return self._caches.setdefault(resource, ObjectCache(resource))


def _points(settings: Settings) -> list[EntryPoint]:
    """Return the entry points that `settings.backends` names as NAME=MODULE:CLASS."""
    pairs = (one.partition("=") for one in settings.backends)
    return [EntryPoint(name, value, registry.GROUP) for name, _, value in pairs]


def _is_stalled(condition: Object) -> bool:
    return bool(condition["type"] == ConditionType.STALLED and condition["status"] == "True")


def _failure(key: Key, error: Exception, wait: float) -> dict[str, object]:
    said = str(error) or type(error).__name__
    return {"job": str(key), "error": said, "again_in_seconds": round(wait, 2)}

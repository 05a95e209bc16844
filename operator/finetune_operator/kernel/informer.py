"""Informer: keeps the cache of one kind filled by a LIST and then a watch.

kopf's watches are not used for children: they parse and dispatch every pod of the cluster, and when
they list again after missed events they lose deletions. Here the server selects by label, only a
few fields are cached, and each list corrects the whole cache.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kube.api_errors import ApiError, ForbiddenError, GoneError, NotFoundError
from finetune_operator.kube.cache import Key, ObjectCache, job_key_of, key_of, version_of
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import Object
from finetune_operator.kube.watch import Watch

log = logging.getLogger(__name__)

ABSENT_SECONDS = 2.0
"""Interval between requests for a kind that the API server does not serve."""

_PAUSE_SECONDS = 0.1  # between a watch that ended normally and the next


@dataclass(frozen=True)
class NotShown:
    """The API server does not show objects: the account may not see them, or their kind is absent.

    Attributes:
        message: Message of the API server.
        since: Time of the first refusal, on the loop's clock.
        remedy: What to do.
    """

    message: str
    since: float
    remedy: str = "give it that right"


class Informer:
    """Keeps one cache filled from one namespace, or from all.

    A missing permission does not block the start, also in a deleted namespace: the informer counts
    as synced, sets `forbidden` and retries. Its cache stays unchanged.

    Args:
        client: Sends the requests.
        watch: Kind, selector and cached fields.
        cache: The cache to fill.
        wake: Called with the job of each changed object; with None if objects of the kind belong to
            no job.
        on_missed_events: Called when a watch broke: events of any kind may be lost.
        namespace: The only namespace; None for all.
        backoff: Waits between two tries.
        used_by: Names of the backends that watch the kind, for the log.

    Attributes:
        is_synced: Set once the first list has completed or was refused.
        forbidden: Why objects are hidden now; the cache must not be relied on then.
        absent: Message of the API server while it does not serve the kind; else empty.
        last_activity: Time of the last request or event, on the loop's clock.
    """

    def __init__(
        self,
        client: KubeClient,
        watch: Watch,
        cache: ObjectCache,
        *,
        wake: Callable[[Key | None], None],
        on_missed_events: Callable[[], None],
        namespace: str | None,
        backoff: Backoff,
        used_by: str = "",
    ) -> None:
        self.watch = watch
        self._used_by = used_by
        self.namespace = namespace
        self.is_synced = asyncio.Event()
        self.forbidden: NotShown | None = None
        self.absent = ""
        self._absent_since = 0.0
        self.last_activity = asyncio.get_running_loop().time()
        self._client = client
        self._cache = cache
        self._wake = wake
        self._on_missed_events = on_missed_events
        self._backoff = backoff
        self._version: str | None = None
        self._bookmark = -1
        self._is_list_forbidden = False

    @property
    def not_shown(self) -> NotShown | None:
        """Why objects of jobs are hidden now; None if they are shown."""
        if self.forbidden or not self.absent or self.watch.selector is None:
            return self.forbidden
        remedy = f"have the cluster serve {self.watch.resource}, or use another backend"
        return NotShown(self.absent, self._absent_since, remedy)

    async def run(self) -> None:
        """List and watch until cancelled; retry after each failure."""
        failures = expiries = 0
        while True:
            try:
                if self._version is None:
                    await self._list()
                async for event in self._client.watch(
                    self.watch.resource,
                    self.namespace,
                    resource_version=self._version or "",
                    label_selector=self.watch.selector,
                ):
                    failures = expiries = 0
                    self._note_activity()
                    self._allow()
                    self._apply(event.type, event.object)
                self._note_activity()
                self._allow()
            except GoneError:
                # 410 is a response, so the server is up: reset the backoff before relisting.
                expiries += 1
                failures = expiries
                self._version = None
                self._on_missed_events()
            except NotFoundError as error:
                failures = 0
                self._version = None
                self._record_absence(str(error))
                self._note_activity()
                await asyncio.sleep(ABSENT_SECONDS)
            except ForbiddenError as error:
                failures += 1
                self._is_list_forbidden = self._version is None
                if self._is_list_forbidden or failures > 1:
                    self._forbid(str(error))
                self._version = None
            except ApiError as error:
                failures += 1
                log.warning("watch broke", extra=self._about(error=str(error)))
                self._on_missed_events()
            await asyncio.sleep(self._backoff.seconds(failures) if failures else _PAUSE_SECONDS)
            self._note_activity()

    async def _list(self) -> None:
        listing = await self._client.list(
            self.watch.resource,
            self.namespace,
            label_selector=self.watch.selector,
            trim=self.watch.trim,
        )
        changed = self._cache.replace(listing.items, listing.resource_version, self.namespace)
        self._version = listing.resource_version
        self._note_activity()
        if self.absent:
            self.absent = ""
            log.info("kind is served again", extra=self._about())
        if self._is_list_forbidden:  # the right to list does not include the right to watch
            self._allow()
        for job in _jobs_of(changed):
            self._wake(job)
        self.is_synced.set()

    def _record_absence(self, message: str) -> None:
        """Record that the kind is not served; empty the cache from the second time."""
        self.is_synced.set()
        if not self.absent:
            self.absent, self._absent_since = message, asyncio.get_running_loop().time()
            log.warning("kind is not served", extra=self._about(error=message))
            return
        newest = max(map(version_of, self._cache), default=0)
        for job in _jobs_of(self._cache.replace((), str(newest), self.namespace)):
            self._wake(job)

    def _forbid(self, message: str) -> None:
        if self.forbidden is None:
            self.forbidden = NotShown(message, asyncio.get_running_loop().time())
            log.warning("watch forbidden", extra=self._about(error=message))
        self.is_synced.set()

    def _allow(self) -> None:
        if self.forbidden is not None:
            self.forbidden = None
            log.info("watch allowed again", extra=self._about())
            self._on_missed_events()

    def _about(self, **fields: str) -> dict[str, str]:
        place = {"namespace": self.namespace} if self.namespace else {}
        return {"resource": str(self.watch.resource), "used_by": self._used_by, **place, **fields}

    def _apply(self, kind: str, obj: Object) -> None:
        self._version = obj["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            # Forget versions up to the previous bookmark only: a response to a write may still be
            # in flight.
            self._cache.forget_deletions(self._bookmark)
            self._bookmark = version_of(obj)
            return
        trimmed = self.watch.trim(obj)
        before = self._cache.get(key_of(trimmed))
        changed = self._cache.remove(trimmed) if kind == "DELETED" else self._cache.put(trimmed)
        if changed and (kind != "MODIFIED" or before is None or not _is_unchanged(before, trimmed)):
            for job in dict.fromkeys((job_key_of(trimmed), job_key_of(before or trimmed))):
                self._wake(job)

    def _note_activity(self) -> None:
        self.last_activity = asyncio.get_running_loop().time()


def _is_unchanged(before: Object, after: Object) -> bool:
    """Whether no retained field changed."""
    if version_of(before) > version_of(after):
        return False  # a response to a write of ours, for which no event has come
    old, new = ({**obj["metadata"], "resourceVersion": ""} for obj in (before, after))
    return {**before, "metadata": old} == {**after, "metadata": new}


def _jobs_of(objects: Iterable[Object]) -> Iterable[Key | None]:
    return dict.fromkeys(job_key_of(obj) for obj in objects)

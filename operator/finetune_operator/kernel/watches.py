"""Keep the caches of children filled: one LIST, then a watch, for ever.

Not kopf's: that one parses and dispatches every pod of the cluster, and loses deletions across a
list that follows a gap. Here a label selects on the server, a few fields are kept, and each list
corrects the whole cache.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kube.cache import (
    Key,
    ObjectCache,
    job_key_of,
    key_of,
    trim_metadata,
    version_of,
)
from finetune_operator.kube.client import KubeClient, Trim
from finetune_operator.kube.compact import compact
from finetune_operator.kube.errors import ApiError, ForbiddenError, GoneError, NotFoundError
from finetune_operator.kube.labels import GRACE_ANNOTATION, JOB_UID_LABEL
from finetune_operator.kube.resources import (
    CONFIG_MAPS,
    ENDPOINT_SLICES,
    FINE_TUNE_PROFILES,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Object,
    Resource,
)

log = logging.getLogger(__name__)

ABSENT_SECONDS = 2.0
"""How often to ask for a kind that the API server does not serve."""

_PAUSE_SECONDS = 0.1  # between a watch that ended as it should and the next
_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "labels",
    "creationTimestamp",
    "deletionTimestamp",
    "ownerReferences",
)


def _kept(source: Mapping[str, Any], *names: str) -> Object:
    return {name: source[name] for name in names if name in source}


def trim_pod(made: Object) -> Object:
    """Keep of a pod who it is, where it is and how it is; of its annotations GRACE_ANNOTATION."""
    spec = _kept(made.get("spec", {}), "nodeName", "containers")
    names = [_kept(one, "name") for one in spec.pop("containers", ())]
    metadata = _kept(made["metadata"], *_METADATA)
    if grace := _kept(made["metadata"].get("annotations") or {}, GRACE_ANNOTATION):
        metadata["annotations"] = grace
    return {
        "metadata": metadata,
        "spec": {**spec, "containers": names},
        "status": made.get("status", {}),
    }


def trim_job(made: Object) -> Object:
    """Keep of a batch Job who it is, its size, its conditions, and how many of its pods live.

    And what makes it end, or make a pod anew: somebody may change that.
    """
    spec = made.get("spec", {})
    return {
        "metadata": _kept(made["metadata"], *_METADATA, "annotations"),
        "spec": _kept(
            spec, "activeDeadlineSeconds", "backoffLimit", "completions", "parallelism", "suspend"
        ),
        "status": _kept(made.get("status", {}), "active", "conditions"),
    }


@dataclass(frozen=True)
class Watched:
    """How one kind is watched.

    Attributes:
        selector: Label selector; None where objects of the kind belong to no single job.
        trim: What is kept of an object.
        is_vital: Whether no job may be looked at while its objects are not shown.
    """

    resource: Resource
    selector: str | None = JOB_UID_LABEL
    trim: Trim = trim_metadata
    is_vital: bool = True


WATCHED: Mapping[str, Watched] = {
    "batch/v1/Job": Watched(JOBS, trim=trim_job),
    "v1/Pod": Watched(PODS, trim=trim_pod),
    "v1/ConfigMap": Watched(CONFIG_MAPS),
    "finetune.dev/v1alpha1/FineTuneProfile": Watched(FINE_TUNE_PROFILES, None),
    "v1/Service": Watched(SERVICES, trim=compact, is_vital=False),
    "networking.k8s.io/v1/NetworkPolicy": Watched(NETWORK_POLICIES, trim=compact, is_vital=False),
    "discovery.k8s.io/v1/EndpointSlice": Watched(
        ENDPOINT_SLICES,
        # Controllers copy a Service's labels to the slices that they write.
        selector=f"{JOB_UID_LABEL},endpointslice.kubernetes.io/managed-by=finetune.dev",
        trim=compact,
        is_vital=False,
    ),
}
"""Kinds a backend may name in its `watches`."""


@dataclass(frozen=True)
class Refused:
    """That the API server does not show something, and no failure of a moment.

    Attributes:
        message: Its sentence.
        since: From when on, on the loop's clock.
    """

    message: str
    since: float


class KindWatch:
    """Keeps one cache filled from one namespace, or from all.

    A right that is missing (also with a namespace that is gone) keeps nobody else waiting: the
    watch counts as synced, says so in `refused` and asks again. What it knew stays in the cache.

    Args:
        client: Who asks.
        watched: What is watched.
        cache: What is filled.
        wake: Called with the job of each object that changed; None for a kind without jobs.
        on_gap: Called when a watch broke, as events may be lost, also those of other watches.
        namespace: Only this one; None for all.
        backoff: Waits between two tries.

    Attributes:
        is_synced: Whether the first list is done, or refused.
        refused: Why nothing can be seen now; whoever goes by the cache must not believe it then.
        absent: What the API server says while it does not serve the kind; else empty.
        heard_at: When the server last said something, or was last asked, on the loop's clock.
    """

    def __init__(
        self,
        client: KubeClient,
        watched: Watched,
        cache: ObjectCache,
        *,
        wake: Callable[[Key | None], None],
        on_gap: Callable[[], None],
        namespace: str | None,
        backoff: Backoff,
    ) -> None:
        self.watched = watched
        self.namespace = namespace
        self.is_synced = asyncio.Event()
        self.refused: Refused | None = None
        self.absent = ""
        self.heard_at = asyncio.get_running_loop().time()
        self._client = client
        self._cache = cache
        self._wake = wake
        self._on_gap = on_gap
        self._backoff = backoff
        self._version: str | None = None
        self._bookmark = -1
        self._is_list_refused = False

    async def run(self) -> None:
        """List and watch until cancelled; a failure is followed by another try."""
        failures = expiries = 0
        while True:
            try:
                if self._version is None:
                    await self._list()
                async for event in self._client.watch(
                    self.watched.resource,
                    self.namespace,
                    resource_version=self._version or "",
                    label_selector=self.watched.selector,
                ):
                    failures = expiries = 0
                    self._hear()
                    self._allow()
                    self._take_in(event.type, event.object)
                self._hear()
                self._allow()
            except GoneError:
                # An answer: what went wrong before it is over, and must not delay the list.
                expiries += 1
                failures = expiries
                self._version = None
                self._on_gap()
            except NotFoundError as error:
                failures = 0
                self._version = None
                self._miss(str(error))
                self._hear()
                await asyncio.sleep(ABSENT_SECONDS)
            except ForbiddenError as error:
                failures += 1
                self._is_list_refused = self._version is None
                if self._is_list_refused or failures > 1:
                    self._refuse(str(error))
                self._version = None
            except ApiError as error:
                failures += 1
                log.warning("watch broke", extra=self._about(error=str(error)))
                self._on_gap()
            await asyncio.sleep(self._backoff.seconds(failures) if failures else _PAUSE_SECONDS)
            self._hear()

    async def _list(self) -> None:
        listing = await self._client.list(
            self.watched.resource,
            self.namespace,
            label_selector=self.watched.selector,
            trim=self.watched.trim,
        )
        changed = self._cache.replace(listing.items, listing.resource_version, self.namespace)
        self._version = listing.resource_version
        self._hear()
        if self.absent:
            self.absent = ""
            log.info("kind is served again", extra=self._about())
        if self._is_list_refused:  # who may list may still not watch
            self._allow()
        for job in _jobs_of(changed):
            self._wake(job)
        self.is_synced.set()

    def _miss(self, message: str) -> None:
        """Note that the kind is not served; it has no objects then, unless it was for a moment."""
        self.is_synced.set()
        if not self.absent:
            self.absent = message
            log.warning("kind is not served", extra=self._about(error=message))
            return
        newest = max(map(version_of, self._cache), default=0)
        for job in _jobs_of(self._cache.replace((), str(newest), self.namespace)):
            self._wake(job)

    def _refuse(self, message: str) -> None:
        if self.refused is None:
            self.refused = Refused(message, asyncio.get_running_loop().time())
            log.warning("watch refused", extra=self._about(error=message))
        self.is_synced.set()

    def _allow(self) -> None:
        if self.refused is not None:
            self.refused = None
            log.info("watch allowed again", extra=self._about())
            self._on_gap()

    def _about(self, **fields: str) -> dict[str, str]:
        place = {"namespace": self.namespace} if self.namespace else {}
        return {"resource": str(self.watched.resource), **place, **fields}

    def _take_in(self, kind: str, made: Object) -> None:
        self._version = made["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            # Of the one before, as an answer may be under way, though not for a minute.
            self._cache.forget_deletions(self._bookmark)
            self._bookmark = version_of(made)
            return
        kept = self.watched.trim(made)
        before = self._cache.get(key_of(kept))
        changed = self._cache.remove(kept) if kind == "DELETED" else self._cache.put(kept)
        if changed and (kind != "MODIFIED" or before is None or not _is_same(before, kept)):
            for job in dict.fromkeys((job_key_of(kept), job_key_of(before or kept))):
                self._wake(job)

    def _hear(self) -> None:
        self.heard_at = asyncio.get_running_loop().time()


def _is_same(before: Object, after: Object) -> bool:
    """Say whether an object was changed in nothing that is kept of it."""
    if version_of(before) > version_of(after):
        return False  # an answer to a write of ours, which nobody was told of
    old, new = ({**one["metadata"], "resourceVersion": ""} for one in (before, after))
    return {**before, "metadata": old} == {**after, "metadata": new}


def _jobs_of(objects: Iterable[Object]) -> Iterable[Key | None]:
    return dict.fromkeys(job_key_of(one) for one in objects)

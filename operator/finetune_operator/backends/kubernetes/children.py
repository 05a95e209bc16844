"""Existing children of a job, from the operator's caches or from the API server.

A cache is used once it contains a full list. Before that, and for kinds without an informer, the
object is read from the API server.
"""

from collections.abc import Callable
from dataclasses import dataclass

from finetune_operator.backends.kubernetes.child_names import (
    CONTROLLER_LABEL,
    AttemptName,
    child_name,
    is_owned,
)
from finetune_operator.backends.kubernetes.pod_facts import PodFacts, facts_of_pod, trim_pod
from finetune_operator.backends.kubernetes.watched import trim_job
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.compact import compact
from finetune_operator.kube.resources import JOBS, PODS, Object, Resource


@dataclass(frozen=True)
class Children:
    """Reads children of one cluster.

    Attributes:
        cluster: The cluster.
        mark: Returns the facts of a pod, with `is_lost` if it counts as lost.
    """

    cluster: Cluster
    mark: Callable[[PodFacts], PodFacts] = lambda pod: pod

    async def batch_job(self, name: AttemptName) -> Object | None:
        """Return the batch Job of that name, regardless of its owner."""
        cache = self.cluster.cache(JOBS)
        if cache.is_synced:
            return cache.get(Key(name.namespace, name.batch_job))
        return await self.ask(name)

    async def ask(self, name: AttemptName) -> Object | None:
        """Return the batch Job of that name from the API server."""
        try:
            return await self.cluster.client.get(JOBS, name.batch_job, name.namespace)
        except NotFoundError:
            return None

    async def other_batch_jobs(self, name: AttemptName, job_uid: str) -> list[Object]:
        """Return the batch Jobs of the job's other attempts; without a cache, of the last one."""
        cache = self.cluster.cache(JOBS)
        found: list[Object | None] = [*cache.of_job(name.key)]
        if not cache.is_synced:
            last = AttemptName(name.namespace, name.job, name.number - 1)
            found = [await self.ask(last)] if last.number > 0 else []
        own = [one for one in found if one is not None and is_owned(one, job_uid)]
        return [one for one in own if one["metadata"]["name"] != name.batch_job]

    async def pods(self, name: AttemptName, uid: str) -> list[PodFacts]:
        """Return the pods of the batch Job with that uid, even if it is deleted."""
        cache = self.cluster.cache(PODS)
        if cache.is_synced:
            found = cache.of_job(name.key)
        else:
            selector = f"{CONTROLLER_LABEL}={uid}"
            listing = await self.cluster.client.list(
                PODS, name.namespace, label_selector=selector, trim=trim_pod
            )
            found = listing.items
        return [self.mark(pod) for pod in map(facts_of_pod, found) if pod.owner_uid == uid]

    def cached_pods(self, job: Key) -> list[PodFacts]:
        """Return all pods of the job in the cache, also of earlier jobs of the same name."""
        return [self.mark(facts_of_pod(one)) for one in self.cluster.cache(PODS).of_job(job)]

    def kept(self, resource: Resource, name: AttemptName) -> Object | None:
        """Return the newest compact form of a child of the job; see `expand`."""
        return self.cluster.cache(resource).get(Key(name.namespace, child_name(name.job)))

    def note_child_response(self, resource: Resource, obj: Object) -> None:
        """Store a response about a child of the job in its cache, like an event of the watch."""
        cache = self.cluster.cache(resource)
        if cache.is_synced:  # otherwise it would never be removed
            cache.put(compact(obj))

    def note_response(self, obj: Object) -> None:
        """Store the response to a write of a batch Job in its cache, so that `observe` sees it."""
        self.cluster.cache(JOBS).put(trim_job(obj))

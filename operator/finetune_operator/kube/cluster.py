"""Access to the cluster for backends whose attempts run in it."""

from collections.abc import Callable
from dataclasses import dataclass

from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import Resource


@dataclass(frozen=True)
class Cluster:
    """Access to one cluster.

    Attributes:
        client: For writes, and for kinds that are not watched.
        cache: Returns the cache of a kind. The kernel fills the caches of the backend's `watches`,
            trimmed by their `trim`. A backend stores the response to a write in the cache, trimmed,
            so that the next reconcile sees it.
        namespaces: Served namespaces; empty for all.
    """

    client: KubeClient
    cache: Callable[[Resource], ObjectCache]
    namespaces: tuple[str, ...] = ()

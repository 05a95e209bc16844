"""What the operator gives to a backend whose attempts are in the cluster."""

from collections.abc import Callable
from dataclasses import dataclass

from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import Resource


@dataclass(frozen=True)
class Cluster:
    """Access to one cluster.

    Attributes:
        client: For writes, and for what is not watched.
        cache: Returns the cache of a kind; those of the backend's `watches` are kept filled with
            what their `trim` keeps. Put the answer to a write into it, trimmed, so that the next
            reconcile sees it.
        namespaces: Namespaces that are served; empty for all.
    """

    client: KubeClient
    cache: Callable[[Resource], ObjectCache]
    namespaces: tuple[str, ...] = ()

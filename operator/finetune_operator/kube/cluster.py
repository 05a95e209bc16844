"""What a backend that lives in the cluster is given by the operator."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

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
        at_end: What is to be closed once no backend is asked any more; push it there.
    """

    client: KubeClient
    cache: Callable[[Resource], ObjectCache]
    namespaces: tuple[str, ...] = ()
    at_end: AsyncExitStack = field(default_factory=AsyncExitStack)

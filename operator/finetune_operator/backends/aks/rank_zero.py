"""Give rank 0's pod its name, where the profile leaves that to us: one EndpointSlice a job.

Called with each look at an attempt; writes once an address.
"""

from collections.abc import Sequence
from typing import Any

from finetune_operator.backends.aks.children import owner_of
from finetune_operator.backends.aks.names import AttemptName
from finetune_operator.backends.aks.network import rank_zero_slice
from finetune_operator.backends.aks.submit import create_or_adopt
from finetune_operator.backends.aks.words import index_of, is_alive
from finetune_operator.kube.cache import Key
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.labels import JOB_LABEL, JOB_UID_LABEL
from finetune_operator.kube.resources import ENDPOINT_SLICES, Object


def address_of(pods: Sequence[Object]) -> str:
    """Return the IP address of rank 0's pod; empty before it has one, and once it has ended."""
    for pod in pods:
        if index_of(pod) == 0 and is_alive(pod):
            return str(pod.get("status", {}).get("podIP", ""))
    return ""


class RankZeroNames:
    """Names that were given; a process that starts anew asks the API server once a job."""

    def __init__(self) -> None:
        self._given: dict[Key, tuple[str, str]] = {}

    async def give(
        self, client: KubeClient, name: AttemptName, batch_job: Object, service: str, address: str
    ) -> None:
        """Let rank 0's name point to `address`.

        Raises:
            AlreadyOwnedError: the EndpointSlice is somebody else's.
            ApiError: the API server refuses, or does not answer.
        """
        wanted = (name.host, address)
        if self._given.get(name.key) == wanted:
            return
        owner = owner_of(batch_job)
        made = rank_zero_slice(_metadata(batch_job, service), service, name.host, address)
        there = await create_or_adopt(client, made, owner["uid"])
        if there.get("endpoints") != made["endpoints"]:
            change = {"metadata": {"uid": there["metadata"]["uid"]}, "endpoints": made["endpoints"]}
            await client.patch(ENDPOINT_SLICES, service, name.namespace, change)
        self._given[name.key] = wanted

    def forget(self, key: Key) -> None:
        """Drop what is known of a job whose attempt is over."""
        self._given.pop(key, None)


def _metadata(batch_job: Object, name: str) -> dict[str, Any]:
    metadata = batch_job["metadata"]
    kept = (JOB_LABEL, JOB_UID_LABEL, "app.kubernetes.io/managed-by")
    return {
        "name": name,
        "namespace": metadata["namespace"],
        "labels": {key: metadata["labels"][key] for key in kept},
        "ownerReferences": [owner_of(batch_job)],
    }

"""Give rank 0's pod its name, where the profile leaves that to us: one EndpointSlice a job.

Called with each look at an attempt; writes once an address, and nothing where the name leads there
already.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune_operator.backends.aks.names import AttemptName, owner_of
from finetune_operator.backends.aks.network import rank_zero_slice
from finetune_operator.backends.aks.reasons import AksReason, Obstacle
from finetune_operator.backends.aks.submit import create_or_adopt
from finetune_operator.backends.aks.words import index_of, is_alive
from finetune_operator.errors import BackendError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.errors import ApiError
from finetune_operator.kube.labels import JOB_LABEL, JOB_UID_LABEL
from finetune_operator.kube.resources import ENDPOINT_SLICES, Object

AGAIN_SECONDS = 10.0


def address_of(pods: Sequence[Object]) -> str:
    """Return the IP address of rank 0's pod; empty before it has one, and once it has ended."""
    for pod in pods:
        if index_of(pod) == 0 and is_alive(pod):
            return str(pod.get("status", {}).get("podIP", ""))
    return ""


@dataclass(frozen=True)
class _Refused:
    """Why a name was not given, and when it is tried again (on the loop's clock)."""

    due: float
    obstacle: Obstacle


class RankZeroNames:
    """Names that were given, by the uid of the batch Job whose pod has it.

    A process that starts anew lists the names of a namespace once, and leaves one alone that leads
    to its pod: also where another version would write more about it.
    """

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._new: set[str] = set()  # nothing can be there
        self._read_anew: set[str] = set()  # what is there may have changed
        # Slices of processes before, by namespace; each is taken out when it is first needed.
        self._before: dict[str, asyncio.Task[dict[str, Object]]] = {}
        self._refused: dict[str, _Refused] = {}

    def note_submitted(self, uid: str, number: int) -> None:
        """Note that this process submitted the attempt of that number just now."""
        (self._new if number == 1 else self._read_anew).add(uid)

    async def give(
        self, client: KubeClient, name: AttemptName, batch_job: Object, service: str, address: str
    ) -> Obstacle:
        """Let rank 0's name point to `address`; return what is in the way.

        Raises:
            FineTuneError: try again at once.
        """
        uid, now = batch_job["metadata"]["uid"], asyncio.get_running_loop().time()
        if self._given.get(uid) == address:
            return Obstacle()
        refused = self._refused.get(uid)
        if refused is not None and now < refused.due:
            return refused.obstacle
        try:
            made = rank_zero_slice(_metadata(batch_job, service), service, name.host, address)
            await self._write(client, made, uid, owner_of(batch_job)["uid"])
        except (ApiError, BackendError) as error:
            if error.retryable:
                raise
            told = Obstacle(AksReason.CREATION_FAILED, str(error))
            self._refused[uid] = _Refused(now + AGAIN_SECONDS, told)
            return told
        self._refused.pop(uid, None)
        self._given[uid] = address
        return Obstacle()

    def forget(self, uid: str) -> None:
        """Drop what is known of an attempt that is over."""
        self._given.pop(uid, None)
        self._new.discard(uid)
        self._read_anew.discard(uid)
        self._refused.pop(uid, None)

    async def _write(self, client: KubeClient, made: Object, uid: str, job_uid: str) -> None:
        name, namespace = made["metadata"]["name"], made["metadata"]["namespace"]
        there, is_there = None, uid in self._read_anew
        if not is_there and uid not in self._new:
            there = (await self._slices(client, namespace)).pop(name, None)
        self._new.discard(uid)
        self._read_anew.add(uid)
        there = await create_or_adopt(client, made, job_uid, there=there, is_there=is_there)
        if _targets(there) != _targets(made):
            change = {"metadata": {"uid": there["metadata"]["uid"]}, "endpoints": made["endpoints"]}
            await client.patch(ENDPOINT_SLICES, name, namespace, change)

    async def _slices(self, client: KubeClient, namespace: str) -> dict[str, Object]:
        """Return what was there when this process first asked: after a restart many do at once.

        A failure answers all who wait for it, and whoever comes next asks again.
        """
        listing = self._before.get(namespace)
        if listing is None or (listing.done() and (listing.cancelled() or listing.exception())):
            listing = self._before[namespace] = asyncio.create_task(_list(client, namespace))
        return await asyncio.shield(listing)


async def _list(client: KubeClient, namespace: str) -> dict[str, Object]:
    found = await client.list(ENDPOINT_SLICES, namespace, label_selector=JOB_UID_LABEL, trim=_trim)
    return {one["metadata"]["name"]: one for one in found.items}


def _trim(made: Object) -> Object:
    """Keep of a slice whose it is and where it leads."""
    metadata = {key: made["metadata"].get(key) for key in ("name", "uid", "ownerReferences")}
    return {"metadata": metadata, "endpoints": made.get("endpoints")}


def _targets(made: Object) -> list[tuple[str, list[str]]]:
    """Return what who resolves the name sees of a slice."""
    endpoints = made.get("endpoints") or ()
    return [(one.get("hostname", ""), one["addresses"]) for one in endpoints]


def _metadata(batch_job: Object, name: str) -> dict[str, Any]:
    metadata = batch_job["metadata"]
    kept = (JOB_LABEL, JOB_UID_LABEL, "app.kubernetes.io/managed-by")
    return {
        "name": name,
        "namespace": metadata["namespace"],
        "labels": {key: metadata["labels"][key] for key in kept},
        "ownerReferences": [owner_of(batch_job)],
    }

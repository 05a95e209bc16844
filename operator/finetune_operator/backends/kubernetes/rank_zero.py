"""Publish the address of rank 0's pod in an EndpointSlice, if the profile selects that.

Called with each observation of an attempt; writes only if the address has changed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune_operator.backends.base import Effect, Obstacle
from finetune_operator.backends.kubernetes.child_names import AttemptName, child_name, owner_of
from finetune_operator.backends.kubernetes.children import Children
from finetune_operator.backends.kubernetes.network import rank_zero_slice
from finetune_operator.backends.kubernetes.reasons import KubernetesReason
from finetune_operator.backends.kubernetes.submit import create_or_adopt
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.errors import BackendError
from finetune_operator.kube.api_errors import ApiError, ConflictError, InvalidError, NotFoundError
from finetune_operator.kube.compact import expand
from finetune_operator.kube.labels import JOB_LABEL, JOB_UID_LABEL
from finetune_operator.kube.resources import ENDPOINT_SLICES, Object

AGAIN_SECONDS = 10.0


def address_of(pods: Sequence[Verdict]) -> str:
    """Return the IP address of rank 0's pod; empty before it has one, and after it has ended."""
    found = (one.pod.address for one in pods if one.pod.index == 0 and one.may_write)
    return next(found, "")


@dataclass(frozen=True)
class _Refused:
    """Why a name was not published, and when to retry (on the loop's clock)."""

    due: float
    obstacle: Obstacle


class RankZeroNames:
    """Published addresses, by the uid of the batch Job.

    A slice with the right address is left unchanged, even if another version has written it.
    """

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._new: set[str] = set()  # attempts that cannot have a slice yet
        self._refused: dict[str, _Refused] = {}

    def note_submitted(self, uid: str, number: int) -> None:
        """Record that this process has just submitted the attempt with this number."""
        if number == 1:
            self._new.add(uid)

    def given(self, uid: str) -> str:
        """Return the published address of the attempt; empty if unknown."""
        return self._given.get(uid, "")

    async def give(
        self,
        children: Children,
        name: AttemptName,
        batch_job: Object,
        recorded: Object | None,
        address: str,
    ) -> Obstacle | None:
        """Publish this address of rank 0; return the obstacle, if there is one.

        `recorded` is the EndpointSlice that the batch Job records; None if it records none.

        Raises:
            FineTuneError: Retry at once.
        """
        uid, now = batch_job["metadata"]["uid"], asyncio.get_running_loop().time()
        if self._given.get(uid) == address:
            return None
        refused = self._refused.get(uid)
        if refused is not None and now < refused.due:
            return refused.obstacle
        try:
            if recorded is None:
                # The name is not read from the facts, because a client could have written the name
                # of another Service there.
                service = child_name(name.job)
                metadata = _metadata(batch_job, service)
                recorded = rank_zero_slice(metadata, service, name.host, address)
            await self._write(children, name, recorded, uid, owner_of(batch_job)["uid"])
        except (ApiError, BackendError) as error:
            if error.retryable:
                raise
            obstacle = Obstacle(KubernetesReason.CREATION_FAILED, str(error), Effect.STALLED)
            self._refused[uid] = _Refused(now + AGAIN_SECONDS, obstacle)
            return obstacle
        self._refused.pop(uid, None)
        self._given[uid] = address
        return None

    def forget(self, uid: str) -> None:
        """Drop the state of a finished attempt."""
        self._given.pop(uid, None)
        self._new.discard(uid)
        self._refused.pop(uid, None)

    async def _write(
        self, children: Children, name: AttemptName, recorded: Object, uid: str, job_uid: str
    ) -> None:
        cache, client = children.cluster.cache(ENDPOINT_SLICES), children.cluster.client
        seen = children.kept(ENDPOINT_SLICES, name) if cache.is_synced else None
        # Without a watch, the slice is read before any write.
        is_there = not cache.is_synced and uid not in self._new
        self._new.discard(uid)
        there = expand(seen) if seen else None
        there = await create_or_adopt(client, recorded, job_uid, there=there, is_there=is_there)
        if _targets(there) != _targets(recorded):
            change = {
                "metadata": {"uid": there["metadata"]["uid"]},
                "endpoints": recorded["endpoints"],
            }
            slice_name, namespace = recorded["metadata"]["name"], recorded["metadata"]["namespace"]
            try:
                there = await client.patch(ENDPOINT_SLICES, slice_name, namespace, change)
            except (ConflictError, InvalidError, NotFoundError):
                if seen is not None:
                    cache.remove(seen)  # deleted, perhaps recreated
                raise
        children.note_child_response(ENDPOINT_SLICES, there)


def _targets(recorded: Object) -> list[tuple[str, list[str]]]:
    """Return the part of a slice that determines the address."""
    endpoints = recorded.get("endpoints") or ()
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

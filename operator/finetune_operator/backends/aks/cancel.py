"""Stop an attempt so that it can never come back, and leave its batch Job as the record.

The batch Job gets a deadline that has passed: its controller then ends all pods with their grace,
makes no new ones, and the name stays taken, so that the same attempt is not started again.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from finetune_operator.backends.aks.children import Children
from finetune_operator.backends.aks.names import CANCELLED_ANNOTATION, QUEUE_LABEL, AttemptName
from finetune_operator.backends.aks.reasons import was_cancelled
from finetune_operator.backends.aks.words import condition, is_alive
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.errors import ConflictError, InvalidError, NotFoundError
from finetune_operator.kube.labels import GRACE_ANNOTATION
from finetune_operator.kube.resources import JOBS, PODS, Object

MIN_GRACE_SECONDS = 1.0
"""With 0 the API server would forget a pod whose processes may still write."""


class Canceller:
    """Cancels attempts of one cluster; remembers which pods were told to hurry."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, float]] = {}  # by the attempt's uid, then the pod's

    async def cancel(
        self, children: Children, name: AttemptName, uid: str, grace_seconds: float
    ) -> None:
        """Stop the attempt; a later call can only shorten the grace, which counts from the first.

        Raises:
            ApiError: the API server refuses, or does not answer.
        """
        batch_job = await children.batch_job(name)
        client = children.cluster.client
        if batch_job is not None and batch_job["metadata"]["uid"] == uid:
            await self._stop(children, name, batch_job)
        pods = [pod for pod in await children.pods(name, uid) if is_alive(pod)]
        told = self._told.setdefault(uid, {})
        await _hurry(client, pods, max(MIN_GRACE_SECONDS, grace_seconds), told)

    async def _stop(self, children: Children, name: AttemptName, batch_job: Object) -> None:
        kinds = ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")
        is_over = any(condition(batch_job, kind).get("status") == "True" for kind in kinds)
        if is_over or was_cancelled(batch_job) or "deletionTimestamp" in batch_job["metadata"]:
            return
        # A queue must not let it go later: without the label it is none of the queue's.
        change: Object = {
            "metadata": {
                "uid": batch_job["metadata"]["uid"],
                "annotations": {CANCELLED_ANNOTATION: "true"},
                "labels": {QUEUE_LABEL: None} if batch_job["spec"].get("suspend") else {},
            },
            "spec": {"activeDeadlineSeconds": 1},
        }
        client = children.cluster.client
        try:
            children.note(await client.patch(JOBS, name.batch_job, name.namespace, change))
        except (ConflictError, InvalidError, NotFoundError):
            # Deleted, perhaps made anew by somebody: what is there now is not the attempt.
            there = await children.ask(name)
            if there is not None and there["metadata"]["uid"] == batch_job["metadata"]["uid"]:
                raise

    def forget(self, uid: str) -> None:
        """Drop what is known of an attempt that is over."""
        self._told.pop(uid, None)


async def _hurry(
    client: KubeClient, pods: Iterable[Object], grace: float, told: dict[str, float]
) -> None:
    """Delete pods that were told of a longer grace; the API server counts from the first."""
    for pod in pods:
        metadata = pod["metadata"]
        if told.get(metadata["uid"], _own_grace(metadata)) <= grace:
            continue
        try:
            await client.delete(
                PODS,
                metadata["name"],
                metadata["namespace"],
                uid=metadata["uid"],
                grace_seconds=grace,
            )
        except (ConflictError, NotFoundError):
            continue  # gone meanwhile
        told[metadata["uid"]] = grace


def _own_grace(metadata: Mapping[str, Any]) -> float:
    """Return the grace the batch Job's controller gives the pod."""
    annotations = metadata.get("annotations") or {}
    return float(annotations.get(GRACE_ANNOTATION, "inf"))

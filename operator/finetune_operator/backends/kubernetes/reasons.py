"""Why a gang does not run yet: reason and message of the condition ResourcesReady. Pure."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from finetune_operator.backends.base import Effect, Obstacle
from finetune_operator.backends.kubernetes.child_names import CONTAINER, QUEUE_LABEL
from finetune_operator.backends.kubernetes.pod_termination import (
    condition,
    container_state,
    index_of,
)
from finetune_operator.kube.resources import Object

_IMAGE = frozenset(
    {"ErrImageNeverPull", "ErrImagePull", "ImageInspectError", "ImagePullBackOff",
     "InvalidImageName", "RegistryUnavailable"}
)  # fmt: skip
_CONTAINER = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


class KubernetesReason(StrEnum):
    """The reasons why a gang does not run; docs/status.md has the remedy for each."""

    QUEUED = "Queued"
    KUEUE_NOT_INSTALLED = "KueueNotInstalled"
    SUSPENDED = "Suspended"
    CREATION_FAILED = "CreationFailed"
    PODS_NOT_CREATED = "PodsNotCreated"
    SCHEDULER_NOT_RESPONDING = "SchedulerNotResponding"
    UNSCHEDULABLE = "Unschedulable"  # if the scheduler gives no reason
    VOLUME_NOT_READY = "VolumeNotReady"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_NOT_CREATED = "ContainerNotCreated"
    POD_NOT_STARTED = "PodNotStarted"
    INIT_CONTAINER_RUNNING = "InitContainerRunning"


_OF_EVENT = {
    "FailedAttachVolume": KubernetesReason.VOLUME_NOT_READY,
    "FailedCreate": KubernetesReason.PODS_NOT_CREATED,
    "FailedCreatePodSandBox": KubernetesReason.POD_NOT_STARTED,
    "FailedMount": KubernetesReason.VOLUME_NOT_READY,
}


def obstacle(batch_job: Object, pods: Sequence[Object]) -> Obstacle | None:
    """Return the obstacle of the batch Job, or of the first pod that has one."""
    name = batch_job["metadata"]["name"]
    if batch_job["spec"].get("suspend"):
        queue = (batch_job["metadata"].get("labels") or {}).get(QUEUE_LABEL)
        if queue:
            text = f"waits for admission by queue {queue}"
            return Obstacle(KubernetesReason.QUEUED, text, Effect.QUEUED)
        text = (
            f"Job {name} was suspended by another client; resume it, or delete it and the next "
            "attempt starts (to pause a job, set its spec.suspend)"
        )
        return Obstacle(KubernetesReason.SUSPENDED, text)
    found = (_of_pod(pod) for pod in sorted(pods, key=index_of))
    return next((one for one in found if one), None)


def _of_pod(pod: Object) -> Obstacle | None:
    name = pod["metadata"]["name"]
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        text = str(scheduled.get("message") or scheduled.get("reason") or "no reason given")
        about_volume = "persistentvolumeclaim" in text.lower() or "volume node" in text.lower()
        word = str(scheduled.get("reason") or KubernetesReason.UNSCHEDULABLE)
        reason = KubernetesReason.VOLUME_NOT_READY if about_volume else word
        return Obstacle(reason, f"pod {name} has no node: {text}")
    status = pod.get("status", {})
    kinds = ("initContainerStatuses", "containerStatuses")
    found = (_of_container(name, one) for kind in kinds for one in status.get(kind) or ())
    return next((one for one in found if one), None)


def _of_container(pod: str, container: Object) -> Obstacle | None:
    waiting = container.get("state", {}).get("waiting") or {}
    reason, text = str(waiting.get("reason", "")), str(waiting.get("message", ""))
    where = f"pod {pod}"
    if container["name"] != CONTAINER:
        where = f"container {container['name']} of {where}"
    if reason in _IMAGE:
        return Obstacle(
            KubernetesReason.IMAGE_PULL_FAILED, f"{where} has no image: {text or reason}"
        )
    if reason in _CONTAINER:
        return Obstacle(
            KubernetesReason.CONTAINER_NOT_CREATED, f"{where} cannot start: {text or reason}"
        )
    if reason == "CrashLoopBackOff":
        return Obstacle(
            KubernetesReason.POD_NOT_STARTED, f"{where} fails again and again: {text or reason}"
        )
    return None


def may_be_explained_by_events(batch_job: Object, pods: Sequence[Object]) -> bool:
    """Return whether a gang without an obstacle may wait for a reason that only Events give.

    A pod without a node is excluded, because the scheduler's reason is in its status.
    """
    if len(pods) < (batch_job["spec"].get("completions") or 1):
        return True
    placed = (pod for pod in pods if condition(pod, "PodScheduled").get("status") == "True")
    return any(container_state(pod, "running") is None for pod in placed)


def from_events(events: Iterable[Object], uids: frozenset[str]) -> Obstacle | None:
    """Return the obstacle in the newest explanatory Event about the objects.

    Failed mounts, and pods that cannot be created, are reported only by Events.
    """
    explaining = [
        one
        for one in events
        if one.get("reason") in _OF_EVENT and one.get("involvedObject", {}).get("uid") in uids
    ]
    if not explaining:
        return None
    newest = max(explaining, key=_when)
    about = newest["involvedObject"]
    text = str(newest.get("message", "")).strip()
    return Obstacle(_OF_EVENT[newest["reason"]], f"{about['kind']} {about['name']}: {text}")


def _when(event: Object) -> str:
    moments = (event.get("lastTimestamp"), event.get("eventTime"))
    created = event["metadata"].get("creationTimestamp", "")
    return str(next((one for one in moments if one), created))

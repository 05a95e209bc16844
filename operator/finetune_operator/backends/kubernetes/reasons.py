"""Why a gang does not run yet: reason and message of the condition ResourcesReady. Pure."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from finetune_operator.backends.base import Effect, Obstacle
from finetune_operator.backends.kubernetes.child_names import QUEUE_LABEL
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.kube.resources import Object


class KubernetesReason(StrEnum):
    """The reasons why a gang does not run; docs/reference/reasons.md has the remedy for each."""

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
    NODE_NOT_RESPONDING = "NodeNotResponding"
    CONTROL_PLANE_CUT_OFF = "ControlPlaneCutOff"


_OF_EVENT = {
    "FailedAttachVolume": KubernetesReason.VOLUME_NOT_READY,
    "FailedCreate": KubernetesReason.PODS_NOT_CREATED,
    "FailedCreatePodSandBox": KubernetesReason.POD_NOT_STARTED,
    "FailedMount": KubernetesReason.VOLUME_NOT_READY,
}


def obstacle(batch_job: Object, verdicts: Sequence[Verdict]) -> Obstacle | None:
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
    found = (one for one in sorted(verdicts, key=lambda one: one.pod.index) if one.reason)
    first = next((one for one in found if one.end is None), None)
    return Obstacle(first.reason, first.message) if first is not None else None


def may_be_explained_by_events(batch_job: Object, verdicts: Sequence[Verdict]) -> bool:
    """Return whether a gang without an obstacle may wait for a reason that only Events give.

    A pod without a node is excluded, because the scheduler's reason is in its status.
    """
    if len(verdicts) < (batch_job["spec"].get("completions") or 1):
        return True
    return any(not one.runs for one in verdicts if one.pod.scheduled.status == "True")


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

"""Turn the facts of a pod into a verdict. Pure: without a clock, and without other pods.

Only here, and in `pod_termination`, does the phase of a pod matter.
"""

from finetune_operator.backends.kubernetes.pod_facts import ContainerFacts, PodFacts
from finetune_operator.backends.kubernetes.pod_termination import judge_end
from finetune_operator.backends.kubernetes.reasons import KubernetesReason
from finetune_operator.backends.kubernetes.verdict import End, PodState, Verdict
from finetune_trainer.config import FailureClass

_IMAGE = frozenset(
    {"ErrImageNeverPull", "ErrImagePull", "ImageInspectError", "ImagePullBackOff",
     "InvalidImageName", "RegistryUnavailable"}
)  # fmt: skip
_CONTAINER = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


def judge(pod: PodFacts) -> Verdict:
    """Return the verdict on a pod."""
    if pod.is_gone or pod.phase in ("Succeeded", "Failed"):
        return judge_end(pod, PodState.ENDED)
    if pod.trainer.state == "terminated":
        return judge_end(pod, PodState.ENDED if pod.is_lost else PodState.LINGERING)
    if pod.is_lost:
        return _lost(pod)
    if pod.is_unreachable:
        remedy = (
            f"if its machine is off or gone, delete the node (kubectl delete node {pod.node}), and "
            "the pod counts as lost"
        )
        reason = KubernetesReason.NODE_NOT_RESPONDING
        return Verdict(pod, PodState.UNREACHABLE, reason, _silent(pod), remedy)
    if pod.deleted:
        return Verdict(pod, PodState.LEAVING)
    if pod.trainer.state == "running":
        return Verdict(pod, PodState.RUNNING)
    return _waiting(pod)


def _lost(pod: PodFacts) -> Verdict:
    """Return the verdict on a pod that its node has not ended."""
    text = f"node {pod.node} has not ended pod {pod.name}, which was deleted"
    if pod.is_unreachable:
        text = f"{_silent(pod)}, and pod {pod.name} has not ended"
    remedy = (
        "its processes may still run there, and cannot write to the folders of the next attempt; "
        f"if the machine is off or gone, delete the node (kubectl delete node {pod.node})"
    )
    end = End(FailureClass.NODE_LOST, is_decided=True)
    reason = KubernetesReason.NODE_NOT_RESPONDING
    return Verdict(pod, PodState.LOST, reason, text, remedy, end)


def _silent(pod: PodFacts) -> str:
    return f"node {pod.node} of pod {pod.name} has not responded since {pod.ready.since}"


def _waiting(pod: PodFacts) -> Verdict:
    """Return the verdict on a pod whose trainer has not started, with the obstacle if any."""
    placed = pod.scheduled
    if placed.status == "False":
        text = placed.message or placed.reason or "no reason given"
        about_volume = "persistentvolumeclaim" in text.lower() or "volume node" in text.lower()
        word = placed.reason or KubernetesReason.UNSCHEDULABLE
        reason = KubernetesReason.VOLUME_NOT_READY if about_volume else word
        return Verdict(pod, PodState.WAITING, reason, f"pod {pod.name} has no node: {text}")
    found = (_obstacle_of(pod, one) for one in pod.containers if one.state == "waiting")
    reason, sentence = next((one for one in found if one is not None), ("", ""))
    return Verdict(pod, PodState.WAITING, reason, sentence)


def _obstacle_of(pod: PodFacts, container: ContainerFacts) -> tuple[str, str] | None:
    """Return reason and sentence for a container that cannot start; None if it may start soon."""
    text, where = container.message or container.reason, f"pod {pod.name}"
    if container.name != pod.trainer.name:
        where = f"container {container.name} of {where}"
    if container.reason in _IMAGE:
        return KubernetesReason.IMAGE_PULL_FAILED, f"{where} has no image: {text}"
    if container.reason in _CONTAINER:
        return KubernetesReason.CONTAINER_NOT_CREATED, f"{where} cannot start: {text}"
    if container.reason == "CrashLoopBackOff":
        return KubernetesReason.POD_NOT_STARTED, f"{where} fails again and again: {text}"
    return None

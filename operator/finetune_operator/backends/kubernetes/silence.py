"""Find which component keeps a gang waiting if neither its objects nor Events give a reason. Pure.

A scheduler, a controller or a kubelet that does not run cannot report that, so only the missing
part of a pod's status shows it. The first seconds are healthy silence.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime

from finetune_operator.backends.base import Obstacle
from finetune_operator.backends.kubernetes.pod_facts import PodFacts, Role
from finetune_operator.backends.kubernetes.reasons import KubernetesReason
from finetune_operator.kube.resources import Object

SILENT_SECONDS = 30.0

_Step = tuple[datetime, Obstacle]
"""A step of a start that a component has not taken: since when, and the obstacle if it is late."""


def silent_component(
    batch_job: Object, pods: Sequence[PodFacts], now: datetime
) -> tuple[Obstacle | None, float | None]:
    """Return the obstacle if a step is late; else the seconds until the next one may be."""
    waits = []
    for since, obstacle in _missing_steps(batch_job, pods):
        left = SILENT_SECONDS - (now - since).total_seconds()
        if left <= 0:
            return obstacle, None
        waits.append(left)
    return None, min(waits, default=None)


def _missing_steps(batch_job: Object, pods: Sequence[PodFacts]) -> Iterator[_Step]:
    metadata, wanted = batch_job["metadata"], batch_job["spec"].get("completions") or 1
    if len(pods) < wanted:
        conditions = batch_job.get("status", {}).get("conditions") or ()  # such as its resumption
        times = (metadata["creationTimestamp"], *map(_changed, conditions))
        text = (
            f"Job {metadata['namespace']}/{metadata['name']} has {len(pods)} of {wanted} pods, and "
            "no Event explains it; check that the Job controller (kube-controller-manager) runs"
        )
        yield (
            max(map(_time, filter(None, times))),
            Obstacle(KubernetesReason.PODS_NOT_CREATED, text),
        )
    for pod in sorted(pods, key=lambda one: one.index):
        if (step := _missing_step_of(pod)) is not None:
            yield step


def _missing_step_of(pod: PodFacts) -> _Step | None:
    if not pod.node and not pod.scheduled.status:
        scheduler = pod.scheduler or "its scheduler"
        text = (
            f"scheduler {scheduler} has not tried to place pod {pod.name}; check that it runs, or "
            "correct schedulerName in the profile and create the job again"
        )
        return _time(pod.created), Obstacle(KubernetesReason.SCHEDULER_NOT_RESPONDING, text)
    running = [one for one in pod.containers if one.role is Role.INIT and one.state == "running"]
    if running and pod.initialized.status != "True":
        last = running[-1]  # init containers start in their order
        text = (
            f"init container {last.name} of pod {pod.name} has not finished; if it hangs, see its "
            f"log: kubectl logs -n {pod.namespace} {pod.name} -c {last.name}"
        )
        since = last.started or pod.created
        return _time(since), Obstacle(KubernetesReason.INIT_CONTAINER_RUNNING, text)
    if pod.node and not pod.has_report:
        text = (
            f"the kubelet of node {pod.node} has not reported on pod {pod.name}; check that the "
            f"node is Ready: kubectl describe node {pod.node}"
        )
        since = pod.scheduled.since or pod.created
        return _time(since), Obstacle(KubernetesReason.POD_NOT_STARTED, text)
    return None


def _changed(found: Object) -> str:
    return str(found.get("lastTransitionTime") or "")


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)

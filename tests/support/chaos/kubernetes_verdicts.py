"""Faults that the cluster names: evictions, lost nodes, rejections, and other containers."""

from typing import Any

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.backends.kubernetes.child_names import CONTAINER
from finetune_operator.kube.resources import JOBS, PODS, Object
from finetune_trainer.config import ExitCode, FailureClass, Termination
from support.chaos.case import LAST_STEP, THE_START, Budget, Case, Truth
from support.chaos.kubernetes_faults import ClusterAct
from support.chaos.played_cluster import PlayedCluster
from support.kubernetes.kubernetes_world import NODES

POD = "tiny-1-1"
OWN_LIMIT = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
PRESSURE = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 52Mi."
NO_ROWS = "spec.dataset.source: /mnt/data/train.jsonl does not exist; correct the path"
OUT_OF_CPU = "Node didn't have enough resource: cpu, requested: 4000, used: 7900, capacity: 8000"
KILLED: Object = {"terminated": {"exitCode": ExitCode.KILLED}}


def reporting(state: Object | None = None, **status: Any) -> ClusterAct:
    """Return an act that changes the status of rank 1's pod."""

    async def act(cluster: PlayedCluster) -> None:
        change = dict(status)
        if state is not None:
            change["containerStatuses"] = [{"name": CONTAINER, "state": state}]
        await cluster.api.patch(PODS, POD, "ns", {"status": change}, subresource="status")

    return act


def disrupted(reason: str, message: str) -> list[Object]:
    """Return the condition by which the cluster states a disruption."""
    found = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return [found]


def refusing(**status: Any) -> ClusterAct:
    """Return an act by which the pods of the first attempt end before their trainers start."""

    async def act(cluster: PlayedCluster) -> None:
        async def refuse(pod: Object) -> bool:
            name = pod["metadata"]["name"]
            if name.startswith("tiny-1-"):
                change = {"status": {"phase": "Failed", **status}}
                await cluster.api.patch(PODS, name, "ns", change, subresource="status")
            return not name.startswith("tiny-1-")

        cluster.ready_before_start = refuse

    return act


async def delete_before_start(cluster: PlayedCluster) -> None:
    async def delete(pod: Object) -> bool:
        if pod["metadata"]["name"] == POD:
            await cluster.api.delete(PODS, POD, "ns", grace_seconds=30)
        return not pod["metadata"]["name"].startswith("tiny-1-")

    cluster.ready_before_start = delete


async def delete_batch_job(cluster: PlayedCluster) -> None:
    for index in range(NODES):
        await cluster.api.delete(PODS, f"tiny-1-{index}", "ns", grace_seconds=30)
    cluster.api.remove(JOBS, "tiny-1", "ns")


async def silence_node(cluster: PlayedCluster) -> None:
    """Let a kubelet be silent; the node controller marks the pod as not ready 50 s later."""
    cluster.silent = {"node-1"}
    await cluster.live(50)
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:01:50Z"}
    pod = await cluster.api.get(PODS, POD, "ns")
    others = [one for one in pod["status"].get("conditions", ()) if one["type"] != "Ready"]
    conditions = [*others, ready, {"type": "ContainersReady", "status": "True"}]
    await reporting(conditions=conditions)(cluster)


async def delete_node(cluster: PlayedCluster) -> None:
    """Let PodGC fail the pod of a node that was deleted."""
    reason = disrupted("DeletionByPodGC", "PodGC: node no longer exists")
    await reporting(phase="Failed", conditions=reason)(cluster)
    cluster.silent = set()


async def end_beside_sidecar(cluster: PlayedCluster) -> None:
    """Let all trainers complete, while a sidecar of each pod runs on."""
    done = Termination(
        failure_class=FailureClass.COMPLETED, exit_code=ExitCode.DONE, message="trained to the end"
    )
    state = {"terminated": {"exitCode": 0, "message": done.to_json()}}
    sidecar = {"name": "proxy", "state": {"running": {}}}
    for index in range(NODES):
        containers = [{"name": CONTAINER, "state": state}, sidecar]
        change: Object = {"status": {"containerStatuses": containers}}
        await cluster.api.patch(PODS, f"tiny-1-{index}", "ns", change, subresource="status")
    cluster.is_done = True


C = FailureClass

CASES = (
    Case(
        "the kubelet evicts a pod for its own limit",
        "status reason Evicted, without a disruption",
        Truth(C.EVICTED, budget=Budget.COUNTED, resumes=40, words=(OWN_LIMIT, "raise the limit")),
        inject=reporting(KILLED, phase="Failed", reason="Evicted", message=OWN_LIMIT),
        is_starred=True,
    ),
    Case(
        "a pod has a deadline of its own",
        "status reason DeadlineExceeded",
        Truth(
            C.EVICTED,
            budget=Budget.COUNTED,
            resumes=40,
            words=("longer than the specified deadline", "activeDeadlineSeconds"),
        ),
        inject=reporting(
            KILLED,
            phase="Failed",
            reason="DeadlineExceeded",
            message="Pod was active on the node longer than the specified deadline",
        ),
    ),
    Case(
        "the kubelet evicts a pod for pressure on the node",
        "status reason Evicted, and condition DisruptionTarget",
        Truth(C.PREEMPTED, budget=Budget.FREE, resumes=40, words=(PRESSURE,)),
        inject=reporting(
            KILLED,
            phase="Failed",
            reason="Evicted",
            message=PRESSURE,
            conditions=disrupted("TerminationByKubelet", PRESSURE),
        ),
    ),
    Case(
        "a trainer fails by itself and is evicted",
        "exit code 65 with the trainer's message, and status reason Evicted",
        Truth(
            C.DATA_ERROR,
            words=("/mnt/data/train.jsonl does not exist",),
            remedy="correct the path",
            phase=JobPhase.FAILED,
            final="DataError",
        ),
        inject=reporting(
            {
                "terminated": {
                    "exitCode": ExitCode.DATA,
                    "message": Termination(
                        failure_class=C.DATA_ERROR, exit_code=ExitCode.DATA, message=NO_ROWS
                    ).to_json(),
                }
            },
            phase="Failed",
            reason="Evicted",
            message=OWN_LIMIT,
        ),
    ),
    Case(
        "a node is deleted",
        "PodGC fails the pod",
        Truth(C.NODE_LOST, budget=Budget.FREE, resumes=40, words=("node no longer exists",)),
        inject=delete_node,
        is_starred=True,
    ),
    Case(
        "a node is silent until it is deleted",
        "condition Ready of a pod is False without a reason; later PodGC fails the pod",
        Truth(
            C.NODE_LOST,
            reason="NodeNotResponding",
            budget=Budget.FREE,
            resumes=40,
            words=("node no longer exists",),
            within=70,
        ),
        inject=silence_node,
        repair=delete_node,
        is_starred=True,
    ),
    Case(
        "the runtime loses a container",
        "termination reason ContainerStatusUnknown",
        Truth(
            C.NODE_LOST,
            budget=Budget.FREE,
            resumes=40,
            words=("ContainerStatusUnknown", "kubectl describe node node-1"),
        ),
        inject=reporting(
            {"terminated": {"exitCode": ExitCode.KILLED, "reason": "ContainerStatusUnknown"}},
            phase="Failed",
        ),
    ),
    Case(
        "a container ends with 255",
        "exit code 255 without a message",
        Truth(
            C.WORKER_LOST,
            budget=Budget.COUNTED,
            resumes=40,
            words=("exit code 255", "kubectl describe node node-1"),
        ),
        inject=reporting({"terminated": {"exitCode": 255}}, phase="Failed"),
    ),
    Case(
        "the kubelet rejects a pod",
        "status reason OutOfcpu before any container ran",
        Truth(C.REJECTED, budget=Budget.FREE, resumes=THE_START, words=(OUT_OF_CPU,)),
        at_step=None,
        inject=refusing(reason="OutOfcpu", message=OUT_OF_CPU),
        is_starred=True,
    ),
    Case(
        "an init container fails",
        "exit code 3 of an init container",
        Truth(
            C.NOT_STARTED,
            budget=Budget.FREE,
            resumes=THE_START,
            words=("init container copy", "exit code 3", "kubectl logs"),
        ),
        at_step=None,
        inject=refusing(
            initContainerStatuses=[
                {"name": "copy", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
            ]
        ),
        is_starred=True,
    ),
    Case(
        "a pod is deleted before it ran",
        "DELETE of a pod whose containers are created",
        Truth(
            C.PREEMPTED,
            budget=Budget.FREE,
            resumes=THE_START,
            words=("was deleted before its trainer ran",),
        ),
        at_step=None,
        inject=delete_before_start,
    ),
    Case(
        "a batch Job is deleted",
        "DELETE of the batch Job while its pods train",
        Truth(C.PREEMPTED, budget=Budget.FREE, resumes=LAST_STEP, words=("deleted it",)),
        inject=delete_batch_job,
        is_starred=True,
    ),
    Case(
        "a sidecar outlives the trainers",
        "all trainers completed, and another container runs on",
        Truth(
            C.COMPLETED,
            reason="Completing",
            words=("trained to the end",),
            phase=JobPhase.SUCCEEDED,
        ),
        inject=end_beside_sidecar,
        is_starred=True,
    ),
)

"""Faults that the cluster names: evictions, lost nodes, rejections, and other containers."""

from typing import Any

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.backends.kubernetes.child_names import CONTAINER
from finetune_operator.kube.resources import EVENTS, JOBS, PODS, Object
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


NOTICED_SECONDS = 50
"""Time after which the node controller marks the pods of a silent node."""


async def silence_node(cluster: PlayedCluster) -> None:
    """Let a node be silent, with the trainer on it."""
    cluster.silent = {"node-1"}
    await cluster.live(NOTICED_SECONDS)
    await cluster.mark_silent(1, 1)


async def fail_beside_silent_node(cluster: PlayedCluster) -> None:
    """Let a node be silent, and 20 seconds later the trainer of the other node fail."""
    cluster.silent = {"node-1"}
    await cluster.live(20)
    words = "rank 1 is gone"
    await cluster.end(1, 0, code=1, words=words, failure=FailureClass.WORKER_LOST)
    await cluster.live(NOTICED_SECONDS - 20)
    await cluster.mark_silent(1, 1)


async def silence_kubelet(cluster: PlayedCluster) -> None:
    """Let a kubelet be silent for five minutes beside a trainer that trains on."""
    await cluster.live(NOTICED_SECONDS)
    await cluster.mark_silent(1, 1)
    await cluster.live(300)


async def hear_node(cluster: PlayedCluster) -> None:
    cluster.silent = set()
    await cluster.mark_silent(1, 1, is_silent=False)


async def kill_by_probe(cluster: PlayedCluster) -> None:
    (pod,) = [one for one in cluster.api.objects(PODS) if one["metadata"]["name"] == "tiny-1-0"]
    event: Object = {
        "metadata": {"name": "kill"},
        "type": "Normal",
        "reason": "Killing",
        "message": "Container trainer failed liveness probe, will be restarted",
        "involvedObject": {"kind": "Pod", "name": "tiny-1-0", "uid": pod["metadata"]["uid"]},
    }
    await cluster.api.create(EVENTS, event, "ns")
    await cluster.end_pods(1, 0, code=ExitCode.KILLED)


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


C = FailureClass
DELETE_NODE = "kubectl delete node node-1"

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
        "a node is silent, and a rank of another node fails",
        "the node acts no longer; after 20 s the other trainer ends with exit code 1",
        Truth(
            C.NODE_LOST,
            reason="Restarting",
            meanwhile=("rank 1 is gone",),
            budget=Budget.FREE,
            resumes=40,
            words=("node node-1 of pod tiny-1-1 has not responded since", DELETE_NODE),
            within=75 - NOTICED_SECONDS,
        ),
        inject=fail_beside_silent_node,
        is_starred=True,
    ),
    Case(
        "a node is silent, and all ranks hang",
        "the node acts no longer, and condition Ready of its pod is False",
        Truth(
            C.NODE_LOST,
            reason="NodeNotResponding",
            meanwhile=("node node-1 of pod tiny-1-1 has not responded since", DELETE_NODE),
            budget=Budget.FREE,
            resumes=40,
            words=("has not progressed since", "its processes may still run there"),
            within=120 - NOTICED_SECONDS,
        ),
        inject=silence_node,
        is_starred=True,
    ),
    Case(
        "a silent node is deleted",
        "condition Ready of a pod is False without a reason; later PodGC fails the pod",
        Truth(
            C.NODE_LOST,
            reason="NodeNotResponding",
            meanwhile=("node node-1 of pod tiny-1-1 has not responded since", DELETE_NODE),
            budget=Budget.FREE,
            resumes=40,
            words=("node no longer exists",),
            within=120 - NOTICED_SECONDS,
        ),
        inject=silence_node,
        repair=delete_node,
    ),
    Case(
        "a silent node responds again",
        "condition Ready of a pod is False without a reason, and then True",
        Truth(
            reason="NodeNotResponding",
            words=("node node-1 of pod tiny-1-1 has not responded since", DELETE_NODE),
            within=120 - NOTICED_SECONDS,
        ),
        inject=silence_node,
        repair=hear_node,
    ),
    Case(
        "a kubelet is silent, and training continues",
        "condition Ready of a pod is False without a reason for five minutes",
        Truth(words=("attempt 1 trains",)),
        inject=silence_kubelet,
        is_starred=True,
    ),
    Case(
        "the liveness probe kills rank 0's pod",
        "Event Killing, then SIGKILL",
        Truth(
            C.HUNG,
            budget=Budget.COUNTED,
            resumes=40,
            words=("was killed by its liveness probe", "deadlines.hangSeconds"),
        ),
        inject=kill_by_probe,
        spec={"deadlines": {"hangSeconds": 600}},
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

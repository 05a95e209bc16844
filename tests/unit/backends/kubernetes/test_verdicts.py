"""The verdict on a pod, by the facts that the cluster reports about it."""

import tracemalloc
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.pod_facts import facts_of_pod, read_pod, trim_pod
from finetune_operator.backends.root_cause import NO_EXIT_CODE
from finetune_operator.kube.resources import Object
from finetune_trainer.config import FailureClass
from support.kubernetes.pod_objects import (
    TIME,
    condition,
    container,
    disrupted,
    ended,
    pod,
    report,
    running,
    state,
)

DONE = report(0, FailureClass.COMPLETED)
DATA = report(65, FailureClass.DATA_ERROR, "row 3 has no messages")
SAVED = report(75, FailureClass.PREEMPTED, "saved step 7")
LOST_PEER = report(1, FailureClass.WORKER_LOST, "rank 3 is gone")
TAIL = "Traceback\nImportError: x\n"
UNSEEN = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "not located"}
LOW = "The node was low on resource: memory."
TOO_LARGE = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi".'
NEVER_STARTED = state("waiting", reason="PodInitializing")


def init(name: str, code: int, why: str = "Error", message: str = "") -> Object:
    """Return the status of a pod whose init container has ended, and the trainer waits."""
    details = {"exitCode": code, "reason": why, "message": message, "startedAt": TIME}
    return {"initContainerStatuses": [container(name, "terminated", **details)], **NEVER_STARTED}


def beside(other: Object, **trainer: Any) -> Object:
    """Return the status of a pod whose trainer has ended beside another container."""
    told = state("terminated", startedAt=TIME, **trainer)["containerStatuses"]
    return {"containerStatuses": [*told, other]}


def unplaced(message: str, reason: str = "Unschedulable") -> Object:
    """Return the status of a pod that the scheduler cannot place."""
    return {"conditions": [condition("PodScheduled", "False", reason, message)]}


def silent(reason: str = "", containers: str = "True") -> Object:
    """Return the conditions of a pod that is no longer Ready."""
    ready = condition("Ready", "False", reason)
    return {"conditions": [ready, condition("ContainersReady", containers)]}


PROXY = container("proxy", "running", startedAt=TIME)

WAITING: Mapping[str, tuple[Object, str, str]] = {
    "just created": (pod(0, "Pending"), "", ""),
    "no node": (
        pod(0, "Pending", **unplaced("0/3 nodes fit")),
        "Unschedulable", "pod tiny-1-0-x has no node: 0/3 nodes fit",
    ),
    "no node, for a reason of another scheduler": (
        pod(0, "Pending", **unplaced("wait", "SchedulingGated")), "SchedulingGated", "wait",
    ),
    "no claim": (
        pod(0, "Pending", **unplaced('persistentvolumeclaim "data" not found')),
        "VolumeNotReady", "not found",
    ),
    "no image": (
        pod(0, "Pending", **state("waiting", reason="ImagePullBackOff", message="no such image")),
        "ImagePullFailed", "pod tiny-1-0-x has no image: no such image",
    ),
    "no Secret": (
        pod(0, "Pending", **state("waiting", reason="CreateContainerConfigError",
                                  message='secret "hub" not found')),
        "ContainerNotCreated", 'cannot start: secret "hub" not found',
    ),
    "only takes its time": (
        pod(0, "Pending", **state("waiting", reason="ContainerCreating")), "", "",
    ),
    "an init container has no image": (
        pod(0, "Pending", **NEVER_STARTED, initContainerStatuses=[
            container("istio-init", "waiting", reason="ErrImagePull", message="denied")]),
        "ImagePullFailed", "container istio-init of pod tiny-1-0-x has no image: denied",
    ),
    "an init container crashes": (
        pod(0, "Pending", **NEVER_STARTED, initContainerStatuses=[
            container("warm", "waiting", reason="CrashLoopBackOff", message="back-off 10s")]),
        "PodNotStarted", "container warm of pod tiny-1-0-x fails again and again: back-off 10s",
    ),
    "a sidecar has no image": (
        pod(0, "Pending", containerStatuses=[
            container("trainer", "waiting", reason="ContainerCreating"),
            container("proxy", "waiting", reason="ErrImagePull", message="denied")]),
        "ImagePullFailed", "container proxy of pod tiny-1-0-x has no image: denied",
    ),
    "a sidecar runs already": (
        pod(0, "Pending", containerStatuses=[
            container("trainer", "waiting", reason="ContainerCreating"), PROXY]),
        "", "",
    ),
}  # fmt: skip

ALIVE: Mapping[str, tuple[Object, str, str]] = {
    "runs": (running(0), "Running", ""),
    "runs beside a sidecar that crashes": (
        pod(0, "Running", containerStatuses=[
            container("trainer", "running", startedAt=TIME),
            container("proxy", "waiting", reason="CrashLoopBackOff")]),
        "Running", "",
    ),
    "runs on a node that is silent": (
        running(0, **silent()), "Unreachable",
        f"node node-0 of pod tiny-1-0-x has not responded since {TIME}; if its machine is off or "
        "gone, delete the node (kubectl delete node node-0)",
    ),
    "was deleted on a node that is silent": (
        running(0, is_deleted=True, **silent()), "Unreachable", "has not responded since",
    ),
    "waits for a readiness gate of a load balancer": (
        running(0, **silent("ReadinessGatesNotReady")), "Running", "",
    ),
    "has an unready sidecar": (
        running(0, **silent("ContainersNotReady", containers="False")), "Running", "",
    ),
    "was unready before its node fell silent": (
        running(0, **silent(containers="False")), "Running", "",
    ),
    "was deleted and saves": (running(0, is_deleted=True), "Leaving", ""),
    "was deleted before it has a node": (
        pod(0, "Pending", is_deleted=True, **unplaced("0/3 nodes fit")), "Leaving", "",
    ),
    "the cluster takes it away while it saves": (
        running(0, is_deleted=True, **disrupted("PreemptionByScheduler")), "Leaving", "",
    ),
}  # fmt: skip

_End = tuple[Object, str, int | None, str]
# What the trainer reports itself: class, exit code and a part of the message.
OWN: Mapping[str, _End] = {
    "completed": (ended(0, 0, DONE), "Completed", 0, "said"),
    "its own error": (ended(0, 65, DATA), "DataError", 65, "row 3 has no messages"),
    "completed, then its node was drained": (
        ended(0, 0, DONE, is_deleted=True, **disrupted("EvictionByEvictionAPI")),
        "Completed", 0, "said",
    ),
    "its own error, then its node was lost": (
        ended(0, 65, DATA, **disrupted("DeletionByPodGC")), "DataError", 65, "row 3",
    ),
    "its own error, then evicted": (
        ended(0, 65, DATA, reason="Evicted", message=TOO_LARGE), "DataError", 65, "row 3",
    ),
    "reports a lost peer while it is preempted": (
        ended(0, 1, LOST_PEER, **disrupted("PreemptionByScheduler")),
        "WorkerLost", 1, "rank 3 is gone",
    ),
    "two reports": (ended(0, 1, DONE), "Error", 1, "1 after its message: said"),
    "hidden by a shell": (
        ended(0, 0, DATA), "DataError", 65,
        "row 3 has no messages (pod tiny-1-0-x ended with exit code 0 nevertheless)",
    ),
    "no trainer": (
        ended(0, 0, why="Completed"), "ConfigError", 78,
        "make spec.image and spec.command of the job's FineTuneProfile run the trainer",
    ),
    "another launcher has no report of node 1": (ended(1, 0), "Completed", 0, "exit code 0"),
    "out of memory": (
        ended(0, 137, why="OOMKilled"), "OutOfMemory", 137, "reached its memory limit",
    ),
    "out of memory while it stopped": (
        ended(0, 143, why="OOMKilled"), "OutOfMemory", 137, "reached its memory limit",
    ),
    "out of memory while it was deleted": (
        ended(0, 137, why="OOMKilled", is_deleted=True), "OutOfMemory", 137, "memory limit",
    ),
    "killed": (ended(0, 137), "WorkerLost", 137, "was killed (SIGKILL)"),
    "stopped before it handled signals": (
        ended(0, 143), "Preempted", 143, "pod tiny-1-0-x was asked to stop (SIGTERM) before",
    ),
    "interrupted before it handled signals": (
        ended(0, 130, "the end of the log"), "Preempted", 130, "asked to stop (SIGINT) before",
    ),
    "stopped with a checkpoint": (ended(0, 75, SAVED), "Preempted", 75, "saved step 7"),
    "signalled after its report": (
        ended(0, 143, SAVED), "Preempted", 143, "143 after its message",
    ),
    "the end of its log": (
        ended(0, 1, TAIL), "Error", 1, "its last output: Traceback\nImportError: x",
    ),
    "an image without a shell": (
        ended(0, 128, 'create task: exec: "sh": executable file not found in $PATH: unknown',
              why="StartError"),
        "ConfigError", 78, "the image of pod tiny-1-0-x does not have the trainer",
    ),
    "another image": (
        ended(0, 1, "/usr/bin/python: No module named finetune_trainer\n"), "ConfigError", 78,
        "set an image that `make images` has built for the nodes in spec.image",
    ),
    "an image for another processor": (
        ended(0, 255, "exec /bin/sh: exec format error"), "ConfigError", 78,
        "is built for another processor than the node's",
    ),
    "an error after a harmless line": (
        ended(0, 1, "exec format error\nRuntimeError: of a step\n"), "Error", 1,
        "its last output: exec format error\nRuntimeError: of a step",
    ),
    "exit code 255 of a runtime": (
        ended(0, 255), "WorkerLost", 255, "container runtime loses a container",
    ),
    "no report of the kubelet": (
        pod(0, "Failed"), "WorkerLost", None, "failed (no reason given)",
    ),
    "succeeded without a report of the kubelet": (
        pod(1, "Succeeded"), "Completed", 0, "without a termination message",
    ),
}  # fmt: skip
# What the cluster has decided.
DECIDED: Mapping[str, _End] = {
    "preempted by the scheduler": (
        ended(0, 137, **disrupted("PreemptionByScheduler", "taken")), "Preempted", 137,
        "pod tiny-1-0-x on node-0 was disrupted (taken)",
    ),
    "drained, with a checkpoint": (
        ended(0, 75, SAVED, **disrupted("EvictionByEvictionAPI", "Eviction API: evicting")),
        "Preempted", 75, "was disrupted (Eviction API: evicting); saved step 7",
    ),
    "drained, hidden by a shell": (
        ended(0, 0, SAVED, **disrupted("EvictionByEvictionAPI")), "Preempted", 75, "saved step 7",
    ),
    "drained, without a report": (
        ended(0, 0, **disrupted("EvictionByEvictionAPI")), "Preempted", None, "was disrupted",
    ),
    "drained while it crashed": (
        ended(0, 1, TAIL, **disrupted("EvictionByEvictionAPI")), "Preempted", 1, "was disrupted",
    ),
    "evicted by node pressure": (
        ended(0, 137, reason="Evicted", message=LOW, **disrupted("TerminationByKubelet", LOW)),
        "Preempted", 137, LOW,
    ),
    "evicted by node pressure before it ran": (
        pod(0, "Failed", reason="Evicted", message=LOW, **disrupted("TerminationByKubelet", LOW)),
        "Preempted", None, LOW,
    ),
    "its node shuts down": (
        ended(0, 143, reason="Terminated", message="Pod was terminated in response to imminent "
              "node shutdown.", **disrupted("TerminationByKubelet")),
        "Preempted", 143, "imminent node shutdown",
    ),
    "its node was deleted": (
        pod(0, "Failed", **state("running", startedAt=TIME),
            **disrupted("DeletionByPodGC", "PodGC: node no longer exists")),
        "NodeLost", None, "pod tiny-1-0-x on node-0 was disrupted (PodGC: node no longer exists)",
    ),
    "its node is unreachable": (
        pod(0, "Failed", is_deleted=True, **state("running", startedAt=TIME),
            **disrupted("DeletionByTaintManager")),
        "NodeLost", None, "DeletionByTaintManager",
    ),
    "a taint drains its node": (
        ended(0, 75, SAVED, is_deleted=True, **disrupted("DeletionByTaintManager")),
        "Preempted", 75, "saved step 7",
    ),
    "evicted for its own volume": (
        ended(0, 137, reason="Evicted", message=TOO_LARGE), "Evicted", 137,
        f"was ended by the kubelet (Evicted): {TOO_LARGE}; raise the limit that is named here",
    ),
    "evicted for its own disk, with a checkpoint": (
        ended(0, 75, SAVED, reason="Evicted", message="ephemeral local storage usage exceeds"),
        "Evicted", 75, "ephemeral local storage usage exceeds; saved step 7",
    ),
    "evicted for its own disk, stopped by a signal": (
        ended(0, 143, reason="Evicted", message="exceeds"), "Evicted", 143, "exceeds",
    ),
    "evicted without a report of its container": (
        pod(0, "Failed", reason="Evicted", message="exceeds", **state("terminated", **UNSEEN)),
        "Evicted", None, "exceeds",
    ),
    "past a deadline on the pod": (
        ended(0, 143, reason="DeadlineExceeded", message="longer than specified deadline"),
        "Evicted", 143, "another client has set activeDeadlineSeconds",
    ),
    "rejected for its cpu": (
        pod(0, "Failed", reason="OutOfcpu", message="Node didn't have enough resource: cpu"),
        "Rejected", None, "was rejected by the kubelet (OutOfcpu): Node didn't have enough",
    ),
    "rejected by a device plugin": (
        pod(0, "Failed", reason="UnexpectedAdmissionError", message="no healthy devices"),
        "Rejected", None, "(UnexpectedAdmissionError): no healthy devices",
    ),
    "rejected for an unknown resource": (
        pod(0, "Failed", reason="OutOfnvidia.com/gpu"), "Rejected", None, "OutOfnvidia.com/gpu",
    ),
    "rejected for its affinity": (
        pod(0, "Failed", reason="NodeAffinity", message="no match"), "Rejected", None, "no match",
    ),
    "an init container failed": (
        pod(0, "Failed", **init("warm", 3, message="no cache")), "NotStarted", None,
        "init container warm of pod tiny-1-0-x on node-0 failed (exit code 3, Error): no cache; "
        "see its log: kubectl logs -n default tiny-1-0-x -c warm",
    ),
    "an init container ran out of memory": (
        pod(0, "Failed", **init("warm", 137, "OOMKilled")), "NotStarted", None, "OOMKilled",
    ),
    "an init container was evicted": (
        pod(0, "Failed", reason="Evicted", message=TOO_LARGE, **init("warm", 137)),
        "Evicted", None, TOO_LARGE,
    ),
    "deleted in an init container": (
        pod(0, "Failed", is_deleted=True, **init("warm", 143)), "Preempted", None,
        "was deleted before its trainer ran",
    ),
    "deleted while an init container failed": (
        pod(0, "Failed", is_deleted=True, **init("warm", 3)), "NotStarted", None, "exit code 3",
    ),
    "deleted before it ran": (
        pod(0, "Failed", is_deleted=True, **state("terminated", **UNSEEN)), "Preempted", None,
        "pod tiny-1-0-x on node-0 was deleted before its trainer ran",
    ),
    "deleted, killed after its grace period": (
        ended(0, 137, is_deleted=True), "Preempted", 137,
        "was deleted, and its trainer stopped before it could save or report",
    ),
    "deleted before it handled signals": (
        ended(0, 143, is_deleted=True), "Preempted", 143, "was deleted",
    ),
    "the runtime lost its container": (
        ended(0, 255, TAIL, why="Unknown"), "NodeLost", None,
        "the node of pod tiny-1-0-x on node-0 has lost the trainer's container (Unknown); if this "
        "recurs, see kubectl describe node node-0",
    ),
    "the kubelet lost its container": (
        pod(0, "Failed", **state("terminated", startedAt=TIME, **UNSEEN)), "NodeLost", None,
        "(ContainerStatusUnknown)",
    ),
}  # fmt: skip

LINGERING: Mapping[str, tuple[Object, str]] = {
    "the kubelet has not reported the end": (
        pod(0, "Running", **state("terminated", exitCode=0, message=DONE)), "Completed",
    ),
    "a sidecar outlives the completed trainer": (
        pod(0, "Running", **beside(PROXY, exitCode=0, message=DONE)), "Completed",
    ),
    "a sidecar outlives the failed trainer": (
        pod(0, "Running", **beside(PROXY, exitCode=65, message=DATA)), "DataError",
    ),
    "a sidecar outlives the trainer of a deleted pod": (
        pod(0, "Running", is_deleted=True, **beside(PROXY, exitCode=75, message=SAVED)),
        "Preempted",
    ),
    "the trainer has ended on a node that is silent": (
        pod(0, "Running", **{**silent(), **beside(PROXY, exitCode=0, message=DONE)}), "Completed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITING)
def test_a_pod_waits_with_the_obstacle_in_the_words_of_the_cluster(name: str) -> None:
    made, reason, message = WAITING[name]
    found = judge(read_pod(made))
    assert (found.state, found.reason) == ("Waiting", reason)
    assert message in found.message
    assert (found.may_write, found.holds_node, found.must_be_ended) == (True, True, False)


@pytest.mark.parametrize("name", ALIVE)
def test_a_trainer_that_may_write_has_a_state_and_no_end(name: str) -> None:
    made, expected, message = ALIVE[name]
    found = judge(read_pod(made))
    assert (found.state, found.termination) == (expected, None)
    assert found.message.startswith(message) or message in found.message
    assert (found.may_write, found.holds_node, found.must_be_ended) == (True, True, False)


@pytest.mark.parametrize("name", [*OWN, *DECIDED])
def test_a_pod_has_ended_for_the_reason_of_the_trainer_or_of_the_cluster(name: str) -> None:
    made, failure, code, message = {**OWN, **DECIDED}[name]
    found = judge(read_pod(made))
    assert found.termination is not None
    assert found.end is not None
    assert (found.state, found.termination.failure_class) == ("Ended", failure)
    assert found.termination.exit_code == (NO_EXIT_CODE if code is None else code)
    assert found.end.is_decided == (name in DECIDED)
    assert message in found.termination.message
    assert (found.may_write, found.holds_node, found.must_be_ended) == (False, False, False)


@pytest.mark.parametrize("name", LINGERING)
def test_a_pod_that_outlives_its_trainer_holds_its_node_and_must_be_ended(name: str) -> None:
    made, failure = LINGERING[name]
    found = judge(read_pod(made))
    assert found.termination is not None
    assert (found.state, found.termination.failure_class) == ("Lingering", failure)
    assert (found.may_write, found.holds_node, found.must_be_ended) == (False, True, True)


def test_a_checkpoint_of_a_stopped_trainer_survives_the_words_of_the_cluster() -> None:
    words = '{"failureClass":"Preempted","exitCode":75,"message":"saved","step":7}'
    found = judge(read_pod(ended(0, 75, words, **disrupted("PreemptionByScheduler"))))
    assert found.termination is not None
    assert found.termination.step == 7


def test_the_table_has_all_situations() -> None:
    tables = (WAITING, ALIVE, OWN, DECIDED, LINGERING)
    assert sum(map(len, tables)) >= 50


def real_pod(number: int) -> Object:
    """Return a running pod with all that an API server of Kubernetes 1.34 stores about it."""
    uid, name, node = f"7c9e6679-7425-40de-944b-e07fc1f9{number:04d}", f"llama-{number}-1-0", "n-1"
    labels = {
        "app.kubernetes.io/managed-by": "finetune-operator",
        "batch.kubernetes.io/controller-uid": uid,
        "batch.kubernetes.io/job-completion-index": "0",
        "batch.kubernetes.io/job-name": f"llama-{number}-1",
        "controller-uid": uid,
        "finetune.dev/attempt": "1",
        "finetune.dev/job": f"llama-{number}",
        "finetune.dev/job-uid": uid,
        "job-name": f"llama-{number}-1",
    }
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": f"llama-{number}-1", "uid": uid,
             "controller": True, "blockOwnerDeletion": True}  # fmt: skip
    image = "registry.example.com/team/finetune-trainer@sha256:" + "0123456789abcdef" * 4
    mounts = [
        {"name": one, "mountPath": f"/mnt/{one}", "recursiveReadOnly": "Disabled"}
        for one in ("config", "dev-shm", "scratch", "claim-0", "claim-1")
    ]
    sizes = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"}
    trainer = {
        "name": "trainer", "ready": True, "started": True, "restartCount": 0, "lastState": {},
        "image": image, "imageID": image, "containerID": "containerd://" + "0123456789abcdef" * 4,
        "state": {"running": {"startedAt": TIME}}, "volumeMounts": mounts,
        "allocatedResources": sizes, "resources": {"limits": sizes, "requests": sizes},
        "user": {"linux": {"uid": 1000, "gid": 1000, "supplementalGroups": [1000]}},
    }  # fmt: skip
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    conditions = [
        {"type": one, "status": "True", "lastProbeTime": None, "lastTransitionTime": TIME,
         "observedGeneration": 1}
        for one in kinds
    ]  # fmt: skip
    return {
        "metadata": {
            "name": name, "namespace": "team-a", "uid": uid, "resourceVersion": str(number),
            "generateName": f"llama-{number}-1-0-", "creationTimestamp": TIME, "labels": labels,
            "annotations": {"finetune.dev/config": "x" * 8000, "finetune.dev/grace-seconds": "30"},
            "ownerReferences": [owner], "finalizers": ["batch.kubernetes.io/job-tracking"],
        },
        "spec": {"nodeName": node, "schedulerName": "default-scheduler",
                 "containers": [{"name": "trainer", "image": image}]},
        "status": {
            "phase": "Running", "conditions": conditions, "containerStatuses": [trainer],
            "hostIP": "10.0.0.1", "hostIPs": [{"ip": "10.0.0.1"}], "podIP": "10.1.0.1",
            "podIPs": [{"ip": "10.1.0.1"}], "qosClass": "Guaranteed", "startTime": TIME,
        },
    }  # fmt: skip


def test_a_cached_pod_takes_at_most_6_kib() -> None:
    texts = [orjson.dumps(real_pod(number)) for number in range(2_000)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        cached = [trim_pod(orjson.loads(text)) for text in texts]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert facts_of_pod(cached[7]).name == "llama-7-1-0"
    assert (after - before) / len(texts) <= 6 * 1024

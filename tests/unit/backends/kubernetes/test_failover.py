"""A lost node costs a minute, and a node that only seems lost costs no attempt."""

from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.labels import FENCED_ANNOTATION
from finetune_operator.kube.resources import (
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    PODS,
    Object,
    Resource,
)
from finetune_trainer.config import CheckpointRef, ExitCode, FailureClass, Phase, Progress
from support.chaos.life import ready
from support.chaos.played_cluster import PlayedCluster, is_alive
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_cases import profile

NOTICED_SECONDS = 50
"""Time after which the node controller marks the pods of a silent node."""

Story = Callable[[PlayedCluster], Coroutine[Any, Any, None]]
HOST_PATH = {"name": "disk", "mountPath": "/disk", "source": {"hostPath": {"path": "/disk"}}}
ON_DISK = {"checkpoint__uri": "pvc://disk/{name}/checkpoints"}


def play(story: Story, *, volumes: tuple[Object, ...] = (), **spec: Any) -> None:
    async def work() -> None:
        async with PlayedCluster.running() as cluster:
            names = [one["name"] for one in volumes]
            given = profile(volumes=list(volumes), allow={"volumes": names})
            value = given.model_dump(by_alias=True, exclude_none=True, mode="json")
            named = {"metadata": {"name": "default"}, "spec": value}
            await cluster.api.create(FINE_TUNE_PROFILES, named)
            await cluster.apply(**spec)
            await cluster.reconcile()
            await start(cluster)
            await story(cluster)

    run(work())


async def start(cluster: PlayedCluster) -> None:
    if cluster.api.objects(JOBS)[0]["spec"]["suspend"]:
        await cluster.suspend(1, False)
    await cluster.until(lambda: cluster.step >= 45, 120)


async def lose_node(cluster: PlayedCluster, *, seconds: int = NOTICED_SECONDS) -> None:
    """Let a node with a trainer be gone, and the node controller notice it."""
    cluster.silent = {"node-1"}
    await cluster.live(seconds)
    await cluster.mark_silent(1, 1)


def is_placed(cluster: PlayedCluster, number: int) -> bool:
    pods = [
        one
        for one in cluster.api.objects(PODS)
        if one["metadata"]["name"].startswith(f"tiny-{number}-")
    ]
    return len(pods) == 2 and all("nodeName" in one["spec"] for one in pods)


def attempts(cluster: PlayedCluster) -> list[Object]:
    return sorted(cluster.status["attempts"], key=lambda one: int(one["number"]))


def check_failed_over(cluster: PlayedCluster) -> None:
    first = attempts(cluster)[0]
    assert first["failureClass"] == FailureClass.NODE_LOST
    assert "exitCode" not in first
    assert "node node-1 of pod tiny-1-1 has not responded since 20" in first["message"]
    assert "its processes may still run there" in first["message"]
    assert "kubectl delete node node-1" in first["message"]
    assert cluster.status["restarts"] == {"counted": 0, "disruptions": 1}


def test_a_lost_node_whose_partner_fails_costs_a_minute() -> None:
    async def story(cluster: PlayedCluster) -> None:
        begun = cluster.now
        cluster.silent = {"node-1"}
        await cluster.live(20)
        await cluster.end(1, 0, code=1, words="rank 1 is gone", failure=FailureClass.WORKER_LOST)
        await cluster.live(NOTICED_SECONDS - 20)
        await cluster.mark_silent(1, 1)
        await cluster.until(lambda: is_placed(cluster, 2), 100)
        assert (cluster.now - begun).total_seconds() <= 75
        await cluster.until(lambda: cluster.step > 45, 100)
        check_failed_over(cluster)
        assert attempts(cluster)[1]["resumedStep"] == 40
        (held,) = [
            one for one in cluster.api.objects(PODS) if one["metadata"]["name"] == "tiny-1-1"
        ]
        assert is_alive(held)

    play(story)


def test_a_lost_node_that_makes_all_ranks_hang_costs_three_minutes() -> None:
    async def story(cluster: PlayedCluster) -> None:
        begun = cluster.now
        await lose_node(cluster)
        await cluster.until(lambda: ready(cluster.status)["reason"] != "Training", 70)
        await cluster.until(lambda: is_placed(cluster, 2), 200)
        assert (cluster.now - begun).total_seconds() <= 190
        await cluster.until(lambda: cluster.step > 45, 100)
        check_failed_over(cluster)

    play(story)


def test_a_queued_job_releases_the_quota_of_its_lost_attempt() -> None:
    async def story(cluster: PlayedCluster) -> None:
        await lose_node(cluster)
        await cluster.until(lambda: cluster.number == 2, 200)
        await cluster.live(5)
        assert cluster.attempts == ["tiny-2"]
        assert cluster.api.objects(JOBS)[0]["spec"]["suspend"]

    play(story, queue={"name": "gpus"})


def test_a_suspended_job_does_not_wait_for_a_lost_node() -> None:
    async def story(cluster: PlayedCluster) -> None:
        await lose_node(cluster)
        await cluster.change(suspend=True)
        await cluster.until(lambda: cluster.status["phase"] == "Suspended", 400)

    play(story)


def test_a_deadline_does_not_wait_for_a_lost_node() -> None:
    async def story(cluster: PlayedCluster) -> None:
        await lose_node(cluster)
        await cluster.until(lambda: cluster.status["phase"] == "Failed", 400)
        assert attempts(cluster)[-1]["failureClass"] in ("DeadlineExceeded", "NodeLost")

    play(story, deadlines={"activeSeconds": 100})


def test_a_deleted_job_does_not_wait_for_a_lost_node() -> None:
    async def story(cluster: PlayedCluster) -> None:
        await lose_node(cluster)
        await cluster.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
        await cluster.until(lambda: not cluster.api.objects(FINE_TUNE_JOBS), 400)

    play(story)


def test_a_volume_that_a_lost_node_holds_is_named_with_the_node() -> None:
    async def story(cluster: PlayedCluster) -> None:
        cluster.has_scheduler = False
        await lose_node(cluster)
        await cluster.until(lambda: cluster.number == 2, 200)
        await cluster.live(2)
        text = "2 node(s) had volume node affinity conflict"
        waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        await cluster._tell(PODS, "tiny-2-0", conditions=[{**waits, "message": text}])
        await cluster.live(40)
        found = ready(cluster.status)
        assert found["reason"] == "VolumeNotReady"
        assert text in found["message"]
        assert "kubectl delete node node-1" in found["message"]

    play(story)


@pytest.mark.parametrize("volume", [HOST_PATH, {**HOST_PATH, "shared": False}])
def test_a_job_with_folders_on_the_lost_node_stalls_and_is_not_started_again(
    volume: Object,
) -> None:
    async def story(cluster: PlayedCluster) -> None:
        await lose_node(cluster)
        await cluster.live(900, 5)
        await check_stalled(cluster)

    play(story, volumes=(volume,), **ON_DISK)


def test_pods_of_an_earlier_version_are_never_taken_for_lost() -> None:
    async def story(cluster: PlayedCluster) -> None:
        for index in range(2):
            none = {"metadata": {"annotations": {FENCED_ANNOTATION: None}}}
            await cluster.api.patch(PODS, f"tiny-1-{index}", "ns", none)
        await lose_node(cluster)
        await cluster.live(900, 5)
        await check_stalled(cluster)

    play(story)


async def check_stalled(cluster: PlayedCluster) -> None:
    assert cluster.number == 1
    found = ready(cluster.status)
    assert (found["status"], found["reason"]) == ("False", "NodeNotResponding")
    stalled = next(one for one in cluster.status["conditions"] if one["type"] == "Stalled")
    assert stalled["status"] == "True"
    assert "out-of-service" in stalled["message"]
    await cluster.change(suspend=True)
    await cluster.live(300, 3)
    assert cluster.status["phase"] == "Suspending"


def test_a_cluster_file_system_on_a_host_path_is_shared() -> None:
    async def story(cluster: PlayedCluster) -> None:
        await lose_node(cluster)
        await cluster.until(lambda: is_placed(cluster, 2), 200)

    play(story, volumes=({**HOST_PATH, "shared": True},), **ON_DISK)


async def flap(cluster: PlayedCluster) -> None:
    for seconds in (45, 90):
        cluster.silent = {"node-1"}
        await cluster.live(NOTICED_SECONDS)
        await cluster.mark_silent(1, 1)
        await cluster.live(seconds - NOTICED_SECONDS if seconds > NOTICED_SECONDS else 1)
        cluster.silent = set()
        await cluster.mark_silent(1, 1, is_silent=False)
        await cluster.live(60)


async def restart_kubelet(cluster: PlayedCluster) -> None:
    """Let a node be silent for ten minutes beside a trainer that trains on."""
    await cluster.mark_silent(1, 1)
    await cluster.live(600, 3)


async def have_readiness_gate(cluster: PlayedCluster) -> None:
    gate = {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}
    whole = {"type": "ContainersReady", "status": "True"}
    await cluster._tell(PODS, "tiny-1-1", conditions=[whole, gate])
    cluster.silent = {"node-1"}  # the ranks hang, for another reason
    await cluster.live(600, 3)
    cluster.silent = set()


async def block_page(cluster: PlayedCluster) -> None:
    await cluster.close_page()
    await cluster.live(300, 3)
    await cluster.mark_silent(1, 1)
    await cluster.live(600, 3)
    await cluster.mark_silent(1, 1, is_silent=False)
    await cluster.open_page()


async def take_ten_minutes_per_evaluation(cluster: PlayedCluster) -> None:
    played = cluster._progress
    cluster._progress = lambda: played().model_copy(  # type: ignore[method-assign]
        update={"phase": Phase.EVALUATING, "step": 45}
    )
    await cluster.mark_silent(1, 1)
    await cluster.live(600, 3)
    del cluster._progress


def take_long_steps(cluster: PlayedCluster) -> None:
    """Let a step take five minutes, with a checkpoint 20 s before the end of each."""
    played, begun = cluster._progress, cluster.now

    def progress() -> Progress:
        steps, seconds = divmod(int((cluster.now - begun).total_seconds()), 300)
        saved = 99 + steps + (seconds >= 280)
        saves = CheckpointRef(step=saved, path=f"/c/step-{saved}", time=0.0, world_size=2)
        return played().model_copy(update={"step": 100 + steps, "checkpoint": saves})

    cluster._progress = progress  # type: ignore[method-assign]


async def take_five_minutes_per_step(cluster: PlayedCluster) -> None:
    take_long_steps(cluster)
    await cluster.live(900, 5)
    await cluster.mark_silent(1, 1)
    await cluster.live(900, 5)
    del cluster._progress


async def restart_operator_in_a_step(cluster: PlayedCluster) -> None:
    """Restart the operator beside a silent node, 20 s before the end of a step."""
    take_long_steps(cluster)
    await cluster.live(800, 5)
    await cluster.mark_silent(1, 1)
    await cluster.live(80)
    cluster.start_process()
    await cluster.live(900, 5)
    del cluster._progress


async def restart_operator(cluster: PlayedCluster) -> None:
    """Restart the operator again and again beside a node that seems lost for two minutes."""
    cluster.silent = {"node-1"}
    await cluster.live(NOTICED_SECONDS)
    await cluster.mark_silent(1, 1)
    for _ in range(3):
        cluster.start_process()
        await cluster.live(40)
    cluster.silent = set()
    await cluster.mark_silent(1, 1, is_silent=False)


@pytest.mark.parametrize(
    "fault",
    [
        flap,
        restart_kubelet,
        have_readiness_gate,
        block_page,
        take_ten_minutes_per_evaluation,
        take_five_minutes_per_step,
        restart_operator_in_a_step,
        restart_operator,
    ],
)
def test_a_node_that_only_seems_lost_costs_no_attempt(fault: Story) -> None:
    async def story(cluster: PlayedCluster) -> None:
        await fault(cluster)
        await cluster.live(120)
        assert cluster.number == 1
        assert (ready(cluster.status)["status"], ready(cluster.status)["reason"]) == (
            "True",
            "Training",
        )

    play(story)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_makes_no_pod_lost(hours: int) -> None:
    async def story(cluster: PlayedCluster) -> None:
        cluster.api.now = lambda: cluster.now + timedelta(hours=hours)
        await cluster.change(suspend=True)
        await cluster.live(1)
        assert cluster.status["phase"] == "Suspending"
        await cluster.until(lambda: cluster.status["phase"] == "Suspended", 60)
        (first,) = attempts(cluster)
        assert (first["failureClass"], first["exitCode"]) == ("Preempted", ExitCode.PREEMPTED)

    play(story)


def test_five_minutes_without_the_api_server_make_no_pod_lost() -> None:
    async def story(cluster: PlayedCluster) -> None:
        await cluster.api.delete(PODS, "tiny-1-1", "ns", grace_seconds=30)
        await cluster.reconcile()
        calls = cluster.api.calls

        def refuse(verb: str, resource: Resource, name: str) -> None:
            if cluster.is_operator:
                calls.add(verb, resource.plural, 0)
                raise UnavailableError(0, "Timeout", "no response")

        cluster.api.before = refuse
        act, cluster.act = cluster.act, no_act  # type: ignore[method-assign]
        await cluster.live(300, 3)
        cluster.api.before = lambda verb, resource, name: None
        await cluster.live(20)
        cluster.act = act  # type: ignore[method-assign]
        await cluster.until(lambda: cluster.number == 2, 60)
        assert attempts(cluster)[0]["failureClass"] == FailureClass.PREEMPTED

    play(story)


async def no_act(step: int) -> None:
    """Let no part of the cluster act."""


def test_no_job_fails_over_while_most_nodes_are_silent_together() -> None:
    async def story(cluster: PlayedCluster) -> None:
        await add_other_pods(cluster, 3)
        for index in range(2):
            await cluster._tell(PODS, f"far-{index}-0", conditions=SILENT)
        await lose_node(cluster)
        await cluster.live(600, 3)
        assert cluster.number == 1
        assert ready(cluster.status)["reason"] == "ControlPlaneCutOff"
        for index in range(2):
            await cluster._tell(PODS, f"far-{index}-0", conditions=HEARD)
        await cluster.live(40)
        assert cluster.number == 1
        await cluster.until(lambda: is_placed(cluster, 2), 200)

    play(story)


SILENT = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
HEARD = [{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}]


async def add_other_pods(cluster: PlayedCluster, count: int) -> None:
    """Have pods of other jobs, one for each node."""
    cluster.room += count
    labels = cluster.api.objects(PODS)[0]["metadata"]["labels"]
    for index in range(count):
        metadata = {"name": f"far-{index}-0", "labels": {**labels, "finetune.dev/job": "other"}}
        owner = {"kind": "Job", "controller": True, "uid": f"uid-{index}", "name": "other-1"}
        pod = {
            "metadata": {**metadata, "ownerReferences": [owner]},
            "spec": {"nodeName": f"far-{index}", "containers": [{"name": "trainer"}]},
        }
        await cluster.api.create(PODS, pod, "ns")
        await cluster._tell(PODS, f"far-{index}-0", {"running": {}}, phase="Running")

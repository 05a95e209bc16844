"""A node that does not respond, and a hang that ends with a liveness probe, are in the status."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from finetune_operator.kube.resources import (
    EVENTS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    PODS,
    Resource,
)
from finetune_trainer.config import Phase, Progress
from support.cluster.played_pods import ProgressServer
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_cases import profile
from support.kubernetes.kubernetes_world import ADDRESS, NODES, KubernetesWorld, pass_time

NOTICED_SECONDS = 50
"""Time after which the node controller marks the pods of a silent node."""

DISK = {"name": "disk", "mountPath": "/disk", "source": {"hostPath": {"path": "/disk"}}}
"""On each node alone, so that no other attempt starts beside a silent node."""

REMEDY = "if its machine is off or gone, delete the node (kubectl delete node node-1)"


def play(
    story: Callable[[KubernetesWorld, ProgressServer], Coroutine[Any, Any, None]], **spec: Any
) -> None:
    async def work() -> None:
        async with ProgressServer(trains(7)).serving(ADDRESS) as page:
            world = KubernetesWorld(page.port)
            spec_of_profile = profile(volumes=[DISK], allow={"volumes": ["disk"]})
            value = spec_of_profile.model_dump(by_alias=True, exclude_none=True, mode="json")
            named = {"metadata": {"name": "default"}, "spec": value}
            await world.api.create(FINE_TUNE_PROFILES, named)
            await world.apply(checkpoint__uri="pvc://disk/{name}", **spec)
            await world.settle()
            await world.make_pods(1)
            await world.run_pods(1, *range(NODES))
            await pass_time(world, 10)
            assert ready(world) == ("True", "Training")
            await story(world, page)

    run(work())


def trains(step: int) -> Progress:
    return Progress(phase=Phase.TRAINING, step=step, total_steps=5000)


def ready(world: KubernetesWorld) -> tuple[str, str]:
    found = world.condition("Ready")
    return found["status"], found["reason"]


def message(world: KubernetesWorld) -> str:
    return str(world.condition("Ready")["message"])


def test_a_job_on_a_silent_node_is_not_ready_within_120_s_with_node_time_and_remedy() -> None:
    async def story(world: KubernetesWorld, page: ProgressServer) -> None:
        await pass_time(world, NOTICED_SECONDS)
        await world.mark_silent(1, 1)
        await pass_time(world, 120 - NOTICED_SECONDS)
        assert ready(world) == ("False", "NodeNotResponding")
        assert world.job["status"]["phase"] == "Unknown"
        assert "node node-1 of pod tiny-1-1 has not responded since 2026-01-01T00:01:" in (
            message(world)
        )
        assert REMEDY in message(world)
        writes, before = world.writes_but_events, world.job["status"]
        world.start_process()
        for _ in range(60):
            await pass_time(world, 60)
            assert world.job["status"]["phase"] == "Unknown"
        assert (world.writes_but_events, world.job["status"]) == (writes, before)
        await world.change(suspend=True)
        await pass_time(world, 5)
        assert world.job["status"]["phase"] == "Suspending"
        assert REMEDY in message(world)
        await pass_time(world, 300)
        assert REMEDY in message(world)

    play(story)


def test_a_job_that_trains_beside_a_silent_kubelet_stays_ready() -> None:
    async def story(world: KubernetesWorld, page: ProgressServer) -> None:
        await world.mark_silent(1, 1)
        for step in range(8, 48):
            page.progress = trains(step)
            await pass_time(world, 15)
            assert ready(world) == ("True", "Training")
        assert REMEDY in message(world)
        await pass_time(world, 100)
        assert ready(world) == ("False", "NodeNotResponding")
        await world.mark_silent(1, 1, is_silent=False)
        await pass_time(world, 30)
        assert ready(world) == ("True", "Training")

    play(story)


def test_an_attempt_that_waits_for_a_pod_on_a_silent_node_names_the_node() -> None:
    async def story(world: KubernetesWorld, page: ProgressServer) -> None:
        await world.mark_silent(1, 1)
        await world.end_pods(1, 0, code=137)
        await pass_time(world, 20)
        assert world.job["status"]["phase"] == "Restarting"
        assert REMEDY in message(world)
        stalled = world.condition("Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "NodeNotResponding")
        assert "node node-1 of pod tiny-1-1 has not responded since" in stalled["message"]
        assert "out-of-service" in stalled["message"]
        assert world.attempts == ["tiny-1"]
        await world.api.delete(PODS, "tiny-1-1", "ns", grace_seconds=30)
        await pass_time(world, 300)
        assert REMEDY in message(world)
        held = {"metadata": {"finalizers": ["audit/records"]}}
        await world.api.patch(FINE_TUNE_JOBS, "tiny", "ns", held)
        await world.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
        await pass_time(world, 60)
        assert ready(world) == ("False", "Deleting")
        assert REMEDY in message(world)

    play(story)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("Container trainer failed liveness probe", "Hung", id="liveness probe"),
        pytest.param("Stopping container trainer", "WorkerLost", id="another cause"),
    ],
)
def test_a_pod_that_its_liveness_probe_has_killed_was_hung(text: str, expected: str) -> None:
    async def story(world: KubernetesWorld, page: ProgressServer) -> None:
        (pod,) = [one for one in world.api.objects(PODS) if one["metadata"]["name"] == "tiny-1-0"]
        about = {"kind": "Pod", "name": "tiny-1-0", "uid": pod["metadata"]["uid"]}
        event = {"metadata": {"name": "kill"}, "type": "Normal", "reason": "Killing"}
        await world.api.create(EVENTS, {**event, "message": text, "involvedObject": about}, "ns")
        await world.end_pods(1, 0, code=137)
        await pass_time(world, 3)
        await world.end_pods(1, 1, code=143)
        await world.conclude(1, "Failed")
        await pass_time(world, 3)
        first = world.job["status"]["attempts"][0]
        assert (first["failureClass"], first["exitCode"], first["node"]) == (
            expected,
            137,
            "node-0",
        )
        assert ("deadlines.hangSeconds" in first["message"]) == (expected == "Hung")
        assert world.job["status"]["restarts"] == {"counted": 1, "disruptions": 0}

    play(story, deadlines={"hangSeconds": 600})


def test_the_end_of_a_job_without_a_liveness_probe_costs_no_list_of_events() -> None:
    async def story(world: KubernetesWorld, page: ProgressServer) -> None:
        lists = []

        def note(verb: str, resource: Resource, name: str) -> None:
            lists.extend([verb] if resource == EVENTS and verb == "list" else [])

        world.api.before = note
        await world.end_pods(1, *range(NODES), code=137)
        await world.conclude(1, "Failed")
        await pass_time(world, 1)
        assert world.job["status"]["attempts"][0]["failureClass"] == "WorkerLost"
        assert lists == []

    play(story)

"""What the status tells of a gang of the kubernetes backend while it does not train."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.labels import JOB_LABEL, JOB_UID_LABEL
from finetune_operator.kube.resources import ENDPOINT_SLICES, JOBS, PODS, Resource
from finetune_trainer.config import Phase, Progress
from support.cluster.played_pods import ProgressServer
from support.kubernetes.kubernetes_world import ADDRESS, KubernetesWorld, look_for

HOOK = 'failed calling webhook "policy": connection refused'
LOADS = Progress(phase=Phase.LOADING)
TRAINS = Progress(phase=Phase.TRAINING, step=1, total_steps=10)


def live(life: Callable[[KubernetesWorld, ProgressServer], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        async with ProgressServer(LOADS).serving(ADDRESS) as said:
            await life(KubernetesWorld(said.port), said)

    asyncio.run(work())


def told(world: KubernetesWorld, kind: str) -> tuple[str, str]:
    found = world.condition(kind)
    return found["status"], found["reason"]


async def running(world: KubernetesWorld) -> None:
    await world.apply()
    await world.settle()
    await world.make_pods(1)
    await world.run_pods(1, 0, 1)
    await look_for(world, 4)


def test_a_gang_that_loads_its_model_has_its_nodes() -> None:
    async def life(world: KubernetesWorld, said: ProgressServer) -> None:
        await running(world)
        await look_for(world, 15)  # since the attempt was opened
        assert told(world, "ResourcesReady") == ("True", "Starting")
        assert told(world, "Running") == ("False", "Starting")
        assert world.job["status"]["nodes"] == {"desired": 2, "ready": 2, "worldSize": 2}

    live(life)


def test_a_gang_whose_batch_job_is_deleted_does_not_run_while_a_pod_hangs() -> None:
    async def life(world: KubernetesWorld, said: ProgressServer) -> None:
        said.progress = TRAINS
        await running(world)
        await asyncio.sleep(KubernetesBackend.first_progress_seconds)
        await look_for(world, 1)
        assert told(world, "Running") == ("True", "Training")
        world.api.remove(JOBS, "tiny-1", "ns")
        world.api.remove(PODS, "tiny-1-0", "ns")
        await look_for(world, 60)
        assert told(world, "Running") == ("False", "Restarting")
        message = world.condition("Ready")["message"]
        assert message.startswith("Job ns/tiny-1 no longer exists; 1 of its pods are still ending")
        assert world.attempts == []
        (hangs,) = world.api.objects(PODS)
        assert hangs["metadata"]["deletionTimestamp"]
        world.api.remove(PODS, "tiny-1-1", "ns")
        await look_for(world, 2)
        assert world.attempts == ["tiny-2"]

    live(life)


def test_a_name_for_rank_0_that_cannot_be_given_is_told_and_meets_the_deadline() -> None:
    def refuse(verb: str, resource: Resource, name: str) -> None:
        if (verb, resource) == ("create", ENDPOINT_SLICES):
            raise UnavailableError(500, "InternalError", HOOK)

    async def life(world: KubernetesWorld, said: ProgressServer) -> None:
        world.api.before = refuse
        await world.apply(deadlines={"pendingSeconds": 60})
        await world.settle()
        await world.make_pods(1)
        await world.run_pods(1, 0)
        await look_for(world, 8)
        assert told(world, "ResourcesReady") == ("False", "BackendFailed")
        assert world.condition("Ready")["message"] == HOOK
        await look_for(world, 60)
        assert told(world, "Failed") == ("False", "PendingDeadlineExceeded")

    live(life)


def test_a_pod_of_the_job_of_this_name_before_is_waited_for_in_the_open() -> None:
    async def life(world: KubernetesWorld, said: ProgressServer) -> None:
        owner = {"kind": "Job", "name": "tiny-3", "uid": "deleted", "controller": True}
        labels = {JOB_LABEL: "tiny", JOB_UID_LABEL: "another"}
        old = {"name": "tiny-3-0-x", "labels": labels, "ownerReferences": [owner]}
        await world.api.create(PODS, {"metadata": old, "spec": {}}, "ns")
        await world.apply(deadlines={"pendingSeconds": 60})
        await look_for(world, 8)
        assert told(world, "ResourcesReady") == ("False", "CreationFailed")
        assert world.condition("Ready")["message"].startswith("pod tiny-3-0-x still exists")
        assert world.attempts == []
        world.api.remove(PODS, "tiny-3-0-x", "ns")
        await look_for(world, 2)
        assert world.attempts == ["tiny-1"]

    live(life)


def test_a_gang_in_a_queue_is_queued_until_it_is_let_go() -> None:
    async def life(world: KubernetesWorld, said: ProgressServer) -> None:
        await world.apply(queue={"name": "team"})
        await world.settle()
        await world.api.patch(JOBS, "tiny-1", "ns", {"spec": {"suspend": True}})
        await look_for(world, 1)
        assert world.job["status"]["phase"] == "Queued"
        assert told(world, "Admitted") == ("False", "Queued")
        await world.api.patch(JOBS, "tiny-1", "ns", {"spec": {"suspend": False}})
        await look_for(world, 1)
        assert world.job["status"]["phase"] == "Starting"
        assert told(world, "Admitted") == ("True", "Admitted")

    live(life)

"""A job that somebody else wrote to be finished while its attempt runs: no pod of it is left."""

from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.kube.resources import EVENTS, FINE_TUNE_JOBS, JOBS, Object
from finetune_trainer.config import FailureClass, Phase, Progress, Termination
from support.cluster.played_pods import ProgressServer
from support.kernel.kernel_world import World
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_world import ADDRESS, NODES, KubernetesWorld

TRAINS = Progress(phase=Phase.TRAINING, step=1, total_steps=10)
SAVED = Termination(failure_class=FailureClass.PREEMPTED, exit_code=75, message="saved step 7")
DONE = Termination(failure_class=FailureClass.COMPLETED, exit_code=0, message="done")


def live(life: Callable[[KubernetesWorld], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        async with ProgressServer(TRAINS).serving(ADDRESS) as said:
            await life(KubernetesWorld(said.port))

    run(work())


async def write(world: World, kind: str) -> None:
    """Write a condition that is final into the status, as `kubectl edit` can."""
    others = [one for one in world.job["status"]["conditions"] if one["type"] != kind]
    final = {"type": kind, "status": "True", "reason": "Mine", "message": "enough"}
    change: Object = {"status": {"conditions": [*others, final]}}
    await world.api.patch(FINE_TUNE_JOBS, "tiny", "ns", change, subresource="status")


async def first_runs(world: KubernetesWorld) -> None:
    await world.apply()
    await world.settle()
    await world.make_pods(1)
    await world.run_pods(1, *range(NODES))
    world.now += timedelta(minutes=1)
    await world.settle()
    assert world.job["status"]["attempt"] == 1


def conditions(world: World) -> dict[str, str]:
    return {one["type"]: one["status"] for one in world.job["status"]["conditions"]}


def told(world: World) -> list[str]:
    every = [one for one in world.api.objects(EVENTS) if one["reason"] == "EndedByOthers"]
    return [one["message"] for one in every]


@pytest.mark.parametrize("kind", ["Complete", "Failed"])
@pytest.mark.parametrize("dies", [False, True], ids=["", "the operator starts anew"])
def test_its_attempt_is_stopped_and_the_status_says_what_is_so(kind: str, dies: bool) -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await write(world, kind)
        await world.settle()
        (batch_job,) = world.api.objects(JOBS)
        assert batch_job["spec"]["activeDeadlineSeconds"] == 1
        assert world.job["status"]["phase"] == "Suspending"
        said = conditions(world)
        assert (said[kind], said["Running"], said["Ready"]) == ("True", "False", "False")
        assert told(world) == [
            f"another writer set {kind} in the status while attempt 1 was open; it saves a "
            "checkpoint and stops"
        ]
        if dies:
            world.start_process()
        await world.end_pods(1, *range(NODES), code=75, words=SAVED.to_json())
        await world.conclude(1, "Failed")
        await world.settle()
        status = world.job["status"]
        assert (status["phase"], status["attempts"][0]["message"]) == ("Failed", "saved step 7")
        assert status["completionTime"]
        said = conditions(world)
        assert (said[kind], said["Reconciling"], said["Stalled"]) == ("True", "False", "True")
        assert world.condition("Ready")["message"].endswith("; it was stopped before it finished")
        assert world.condition(kind)["message"] == "enough"
        assert world.attempts == ["tiny-1"]

    live(life)


def test_an_attempt_that_is_done_all_the_same_is_complete() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await write(world, "Complete")
        await world.end_pods(1, *range(NODES), code=0, words=DONE.to_json())
        await world.conclude(1, "Complete")
        await world.settle()
        status = world.job["status"]
        assert (status["phase"], status["artifacts"]) == ("Succeeded", ["pvc://models/tiny"])
        assert world.condition("Complete")["reason"] == "Completed"
        assert conditions(world)["Ready"] == "True"

    live(life)


@pytest.mark.parametrize("dies", [False, True], ids=["", "the operator starts anew"])
def test_an_attempt_whose_pods_were_never_observed_is_stopped(dies: bool) -> None:
    async def life(world: KubernetesWorld) -> None:
        await world.apply()
        await world.settle()
        await world.make_pods(1)
        await write(world, "Complete")
        if dies:
            world.start_process()
        await world.settle()
        (batch_job,) = world.api.objects(JOBS)
        assert batch_job["spec"]["activeDeadlineSeconds"] == 1
        await world.conclude(1, "Failed")
        await world.settle()
        assert world.job["status"]["attempts"][0]["endTime"]

    live(life)


def test_one_whose_attempt_was_never_created_creates_none() -> None:
    async def work() -> None:
        world = World()
        world.api.is_used_up = True
        await world.apply()
        await world.settle()
        assert world.job["status"]["attempt"] == 1
        await write(world, "Complete")
        world.api.is_used_up = False
        await world.settle()
        assert world.attempts == []
        assert world.job["status"]["attempts"][0]["endTime"]
        assert conditions(world)["Stalled"] == "True"

    run(work())

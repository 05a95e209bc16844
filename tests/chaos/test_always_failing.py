"""A job whose pods always fail is restarted a bounded number of times in an hour."""

from datetime import timedelta

import pytest

from finetune_trainer.config import CheckpointRef, Phase, Progress
from support.cluster.played_pods import ProgressServer
from support.kernel.kernel_world import START
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_world import ADDRESS, NODES, KubernetesWorld

FREE = {"maxRestarts": 0, "rules": [{"onClass": "WorkerLost", "action": "RestartFree"}]}
SAVED = CheckpointRef(step=500, path="/c/step-500", time=0.0, world_size=2)
TRAINED = Progress(phase=Phase.TRAINING, step=500, total_steps=1000, checkpoint=SAVED)


@pytest.mark.parametrize("trains", [False, True], ids=["from the start", "after 500 good steps"])
def test_pods_that_always_fail_are_created_at_most_twenty_times_in_an_hour(trains: bool) -> None:
    async def work() -> None:
        async with ProgressServer(TRAINED).serving(ADDRESS) as page:
            world = KubernetesWorld(page.port)
            await world.apply(restartPolicy=FREE)
            await world.settle()
            await world.make_pods(1)
            if trains:
                await world.run_pods(1, *range(NODES))
                await world.settle()
                assert world.job["status"]["attempts"][0]["savedStep"] == 500
            number = 0
            while world.now < START + timedelta(hours=1) and number <= 20:
                number = await fail(world)
            assert 10 < number <= 20
            *ended, _ = world.job["status"]["attempts"]
            assert not any("savedStep" in one or "lastStep" in one for one in ended)

    run(work())


async def fail(world: KubernetesWorld) -> int:
    """Fail the newest attempt, and wait until the next one is created; return its number."""
    number = world.job["status"]["attempt"]
    await world.end_pods(number, *range(NODES), code=137)
    await world.conclude(number, "Failed")
    look = await world.settle()
    while f"tiny-{number + 1}" not in world.attempts:
        assert look.requeue_seconds
        world.now += timedelta(seconds=look.requeue_seconds)
        look = await world.settle()
    await world.make_pods(number + 1)
    return int(number) + 1

"""Where attempts live is what a backend says, not what it watches."""

from importlib.metadata import EntryPoint

import pytest

from finetune_operator.backends import registry
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS
from support.kernel.kernel_world import KEY, World
from support.kernel.virtual_time import run

POINTS = [
    EntryPoint("unwatched", "support.kernel.configmap_backend:UnwatchedBackend", registry.GROUP),
    EntryPoint("distant", "support.kernel.configmap_backend:DistantBackend", registry.GROUP),
]


@pytest.mark.parametrize(
    ("name", "finalizers"),
    [
        pytest.param("unwatched", None, id="in the cluster"),
        pytest.param("distant", ["finetune.dev/backend"], id="elsewhere"),
    ],
)
def test_a_job_is_kept_for_what_lives_outside_the_cluster_alone(
    name: str, finalizers: list[str] | None
) -> None:
    async def work() -> None:
        world = World()
        world.start_process(POINTS)
        await world.apply(backend={"type": name})
        await world.settle()
        assert world.job["metadata"].get("finalizers") == finalizers
        assert len(world.api.objects(CONFIG_MAPS)) == (finalizers is None)
        await world.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
        await world.settle()  # it is told to end,
        await world.settle()  # ... and is gone
        assert world.api.objects(FINE_TUNE_JOBS) == []
        assert world.api.objects(CONFIG_MAPS) == []

    run(work())


def test_recorded_attempt_without_a_handle_is_found_by_its_name_without_a_watch() -> None:
    async def work() -> None:
        world = World()
        world.start_process(POINTS)
        await world.apply(backend={"type": "unwatched"})
        await world.catch_up()
        await world.reconciler.reconcile(KEY)
        assert "backendRef" not in world.job["status"]  # goes out with the next status
        world.start_process(POINTS)
        await world.catch_up()
        await world.change(suspend=True)
        await world.settle()
        assert world.job["status"]["attempt"] == 1
        assert world.most_alive == 1
        assert "gone" in world.api.objects(CONFIG_MAPS)[0]["data"]

    run(work())

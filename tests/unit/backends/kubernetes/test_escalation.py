"""What an author of FineTuneJobs tries between two looks of the operator, which checks then."""

import asyncio

import pytest

from finetune_operator.kube.api_errors import InvalidError
from finetune_operator.kube.resources import FINE_TUNE_PROFILES, JOBS, Resource
from support.kernel.kernel_world import World, nothing
from support.kubernetes.kubernetes_cases import JOB, profile


def with_a_profile() -> World:
    world = World()
    spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
    metadata = {"name": "default", "resourceVersion": "1"}
    world.cache(FINE_TUNE_PROFILES).put({"metadata": metadata, "spec": spec})
    return world


def refuse_jobs(verb: str, resource: Resource, name: str) -> None:
    if (verb, resource) == ("create", JOBS):
        raise InvalidError(422, "Invalid", "the pod template is not valid")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"backend": {"kubernetes": {"image": "evil:1"}}}, "spec.backend.kubernetes.image evil:1"),
        ({"output": {"uri": "pvc://private/x"}}, "spec.output.uri private"),
        (
            {"topology": {"nodes": 8}, "training": {"globalBatchSize": 8}},
            "spec.topology.nodes 8 is more than the 4",
        ),
    ],
)
def test_an_attempt_that_could_not_be_created_does_not_become_another(
    wanted: dict[str, object], says: str
) -> None:
    async def story() -> None:
        world = with_a_profile()
        await world.apply(**{**JOB, "metadata.namespace": "ns"})
        world.api.before = refuse_jobs
        await world.settle()
        assert world.condition("Stalled")["message"] == "the pod template is not valid"
        await world.change(suspend=True, **wanted)
        world.api.before = nothing
        await world.settle()
        assert world.api.objects(JOBS) == []
        assert says in world.condition("Stalled")["message"]

    asyncio.run(story())

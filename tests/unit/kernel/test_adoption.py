"""Attempts that operator 0.1.0 had created before it recorded them survive the upgrade."""

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends import registry
from finetune_operator.backends.base import Attempt, Backend, BackendContext, Found
from finetune_operator.backends.kubernetes.child_names import FACTS_ANNOTATION
from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, JOBS
from support.kernel.configmap_backend import ConfigMapBackend
from support.kernel.kernel_world import KEY, POINTS, World, at_write
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_world import KubernetesWorld

UNWATCHED = EntryPoint(
    "unwatched", "support.kernel.configmap_backend:UnwatchedBackend", registry.GROUP
)
AWAY = UnavailableError(0, "Timeout", "no answer in time")


async def upgraded(
    points: Sequence[EntryPoint] = POINTS, backend: str = "configmap", **spec: object
) -> World:
    """Return a cluster whose new leader has a job with an unrecorded attempt and a later spec."""
    world = World()
    world.start_process(points)
    await world.apply(backend={"type": backend})
    await world.leave_unrecorded(points)
    if spec:
        await world.change(**spec)
    await world.catch_up()
    return world


def test_unrecorded_attempt_is_adopted_and_not_created_again() -> None:
    async def work() -> None:
        world = await upgraded()
        children = world.api.objects(CONFIG_MAPS)
        await world.settle()
        status = world.job["status"]
        assert (status["phase"], status["attempt"]) == ("Starting", 1)
        assert status["backendRef"]["uid"] == children[0]["metadata"]["uid"]
        assert status["startTime"] == children[0]["metadata"]["creationTimestamp"]
        assert world.api.objects(CONFIG_MAPS) == children
        await world.play(1, phase="Running", ready="1", step="1")
        await world.settle()
        assert world.job["status"]["phase"] == "Running"

    run(work())


@pytest.mark.parametrize(("points", "backend"), [(POINTS, "configmap"), ([UNWATCHED], "unwatched")])
def test_job_suspended_during_the_upgrade_stops_its_unrecorded_attempt(
    points: Sequence[EntryPoint], backend: str
) -> None:
    async def work() -> None:
        world = await upgraded(points, backend, suspend=True)
        await world.settle()
        status = world.job["status"]
        assert (status["phase"], status["attempt"]) == ("Suspended", 1)
        assert world.condition("Accepted")["observedGeneration"] == 1
        assert world.condition("Suspended")["observedGeneration"] == 2
        (child,) = world.api.objects(CONFIG_MAPS)
        assert child["data"]["gone"]
        assert world.most_alive == 1

    run(work())


def test_deleted_job_stops_its_unrecorded_attempt() -> None:
    async def work() -> None:
        world = await upgraded()
        hold = {"metadata": {"finalizers": ["example.com/hold"]}}
        await world.api.patch(FINE_TUNE_JOBS, "tiny", "ns", hold)
        await world.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
        await world.settle()
        assert world.job["status"]["phase"] == "Deleting"
        (child,) = world.api.objects(CONFIG_MAPS)
        assert child["data"]["code"] == "75"

    run(work())


def test_unrecorded_attempt_of_a_job_that_is_now_refused_runs_on() -> None:
    async def work() -> None:
        world = await upgraded(model={"revision": "forbidden"})
        children = world.api.objects(CONFIG_MAPS)
        await world.settle()
        assert world.job["status"]["attempt"] == 1
        assert world.condition("Accepted")["status"] == "True"
        assert world.api.objects(CONFIG_MAPS) == children

    run(work())


def test_unrecorded_attempt_is_searched_for_once_the_spec_can_be_parsed() -> None:
    async def work() -> None:
        world = await upgraded(training={"globalBatchSize": "many"}, suspend=True)
        await world.settle()
        assert world.condition("Accepted")["status"] == "False"
        await world.change(training={"globalBatchSize": 4})
        await world.settle()
        assert world.job["status"]["phase"] == "Suspended"
        (child,) = world.api.objects(CONFIG_MAPS)
        assert child["data"]["gone"]

    run(work())


def test_adopted_attempt_that_cannot_be_observed_is_reported() -> None:
    async def work() -> None:
        world = KubernetesWorld(9400)
        await world.apply()
        await world.leave_unrecorded()
        change = {"metadata": {"annotations": {FACTS_ANNOTATION: None}}}
        await world.api.patch(JOBS, "tiny-1", "ns", change)
        await world.settle()
        assert world.job["status"]["attempt"] == 1
        assert world.job["status"]["backendRef"]["name"] == "ns/tiny-1"
        assert "attempt 1 is left alone: it continues" in world.condition("Stalled")["message"]

    run(work())


@pytest.mark.parametrize("is_done", [False, True], ids=["before the write", "after the write"])
def test_adoption_is_repeated_after_a_write_without_a_response(is_done: bool) -> None:
    async def work() -> None:
        world = await upgraded(suspend=True)
        hook = at_write(1, AWAY)
        if is_done:
            world.api.after = hook
        else:
            world.api.before = hook
        with pytest.raises(UnavailableError):
            await world.reconciler.reconcile(KEY)
        await world.settle()
        assert world.job["status"]["phase"] == "Suspended"
        (child,) = world.api.objects(CONFIG_MAPS)
        assert child["data"]["gone"]

    run(work())


class CountingBackend(ConfigMapBackend):
    """A backend that counts the searches for attempts."""

    searches: ClassVar[list[int]] = []

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        self.searches.append(attempt.number)
        return await super().find(job, attempt)


class CountingWorld(World):
    """A cluster whose operator has that backend alone."""

    def given(self, context: BackendContext) -> Mapping[str, Backend]:
        return {"configmap": CountingBackend(context)}


def test_job_without_an_attempt_is_searched_once_per_term() -> None:
    async def work() -> None:
        world = CountingWorld()
        await world.apply(suspend=True)
        for expected in ([1], [1, 1]):
            for _ in range(3):
                await world.settle()
            assert CountingBackend.searches == expected
            world.start_process()

    run(work())

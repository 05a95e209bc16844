"""What keeps a job from running is told within seconds, and no more often than anybody reads."""

from datetime import timedelta
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from finetune_operator.backends import registry
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.errors import FineTuneError, TransientError
from finetune_operator.kube.api_errors import (
    ApiError,
    ForbiddenError,
    ThrottledError,
    UnavailableError,
)
from finetune_operator.kube.resources import CONFIG_MAPS, Resource
from support.kernel.fake_api import BeforeCall
from support.kernel.fake_backend import FakeBackend
from support.kernel.kernel_world import KEY, POINTS, World, nothing
from support.kernel.virtual_time import run

HOOK = 'failed calling webhook "policy": connection refused'
WEBHOOK = UnavailableError(500, "InternalError", HOOK)
THROTTLED = ThrottledError(429, "TooManyRequests", "too many requests", retry_after=1)


def refusing(error: ApiError) -> BeforeCall:
    def hook(verb: str, resource: Resource, name: str) -> None:
        if (verb, resource) == ("create", CONFIG_MAPS):
            raise error

    return hook


async def look(world: World, seconds: float, every: float = 1.0) -> None:
    """Let time pass with a look each time, whatever comes of it."""
    for _ in range(round(seconds / every)):
        world.now += timedelta(seconds=every)
        await world.catch_up()
        try:
            again = 0.0
            while again == 0.0:
                again = (await world.reconciler.reconcile(KEY)).requeue_seconds or 1.0
                await world.catch_up()
        except FineTuneError as error:
            if not error.retryable:
                raise


async def refused(error: ApiError, **spec: Any) -> World:
    world = World()
    world.api.before = refusing(error)
    await world.apply(**spec)
    return world


@pytest.mark.parametrize("error", [WEBHOOK, THROTTLED], ids=["webhook", "throttled"])
def test_a_creation_that_fails_again_and_again_is_told_after_five_seconds(error: ApiError) -> None:
    async def work() -> None:
        world = await refused(error)
        await look(world, 5)
        assert world.condition("ResourcesReady")["reason"] == "Provisioning"
        await look(world, 2)
        ready = world.condition("ResourcesReady")
        assert (ready["status"], ready["reason"]) == ("False", "CreationFailed")
        assert ready["message"] == error.message
        assert world.condition("Reconciling")["status"] == "True"
        world.api.before = nothing
        await look(world, 3)
        assert world.attempts == ["tiny-1"]
        assert world.condition("ResourcesReady")["reason"] == "Provisioning"

    run(work())


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("pendingSeconds", "PendingDeadlineExceeded"),
        ("activeSeconds", "ActiveDeadlineExceeded"),
    ],
)
def test_a_creation_that_never_succeeds_meets_the_deadlines(limit: str, reason: str) -> None:
    async def work() -> None:
        world = await refused(WEBHOOK, deadlines={limit: 60})
        await look(world, 59)
        assert world.job["status"]["phase"] == "Starting"
        await look(world, 3)
        failed = world.condition("Failed")
        assert (failed["status"], failed["reason"]) == ("True", reason)
        assert f"deadlines.{limit} 60: {HOOK}; " in failed["message"]

    run(work())


def test_an_attempt_that_was_created_without_an_answer_does_not_outlive_its_job() -> None:
    async def work() -> None:
        world = await refused(WEBHOOK, deadlines={"pendingSeconds": 60})
        await look(world, 55)
        count, world.api.before = world.api.after, nothing
        world.api.after = lambda *call: (count(*call), refusing(WEBHOOK)(*call))[0]
        await world.catch_up()
        with pytest.raises(UnavailableError):
            await world.reconciler.reconcile(KEY)
        world.api.after = count
        assert world.attempts == ["tiny-1"]
        world.caches[CONFIG_MAPS].replace([], "0")  # no watch has told of it
        world.now += timedelta(seconds=10)
        await world.settle()
        assert world.condition("Failed")["reason"] == "PendingDeadlineExceeded"
        (ended,) = world.api.objects(CONFIG_MAPS)
        assert ended["data"]["gone"] == "true"

    run(work())


def test_pods_that_do_not_go_are_told_and_meet_the_deadline() -> None:
    async def work() -> None:
        world = World()
        await world.apply(model__revision="lingers", deadlines={"pendingSeconds": 60})
        await look(world, 8)
        assert world.condition("ResourcesReady")["message"].startswith("a pod is still there")
        await look(world, 55)
        assert world.condition("Failed")["reason"] == "PendingDeadlineExceeded"
        assert world.attempts == []

    run(work())


@pytest.mark.parametrize("name", ["fake", "cheap"])
def test_a_job_is_not_failed_while_nobody_can_say_whether_its_attempt_exists(name: str) -> None:
    async def work() -> None:
        world = World()
        cheap = EntryPoint("cheap", "support.kernel.configmap_backend:CheapBackend", registry.GROUP)
        world.start_process([*POINTS, cheap])
        fake = world.backends.get(name).backend
        assert isinstance(fake, FakeBackend)
        await world.apply(backend={"type": name}, deadlines={"pendingSeconds": 60})
        fake.errors = {"submit": [TransientError("no answer")] * 999}
        await look(world, 9)
        fake.errors["find"] = [TransientError("no answer")] * 999
        await look(world, 200)
        assert world.job["status"]["phase"] == "Starting"
        fake.errors["find"] = []
        await look(world, 3)
        assert world.condition("Failed")["reason"] == "PendingDeadlineExceeded"
        assert fake.alive == []

    run(work())


def test_what_keeps_a_job_from_being_suspended_is_told_and_meets_no_deadline() -> None:
    async def work() -> None:
        world = World()
        await world.apply(model__revision="lingers", deadlines={"pendingSeconds": 60})
        await look(world, 8)
        await world.change(suspend=True)
        await look(world, 100)
        assert world.job["status"]["phase"] == "Suspending"
        assert "a pod is still there" in world.condition("Suspended")["message"]

    run(work())


def test_what_keeps_a_suspended_job_from_going_on_is_told() -> None:
    async def work() -> None:
        world = await refused(WEBHOOK)
        await look(world, 8)
        await world.change(suspend=True)
        await look(world, 1)
        assert world.job["status"]["phase"] == "Suspended"
        await world.change(suspend=False, model={"revision": "lingers"})
        await look(world, 1)
        told = world.condition("Suspended")
        assert (told["status"], told["observedGeneration"]) == ("True", 3)
        assert told["message"].startswith("resumed, but attempt 1 cannot start yet: a pod is still")

    run(work())


def patches(world: World) -> int:
    return world.api.calls.by_kind.get(("patch", "finetunejobs", 200), 0)


async def stuck(world: World, message: str, reason: str = "Unschedulable") -> None:
    await world.play(1, phase="Pending", reason=reason, message=message)
    await look(world, 1)


async def starting() -> World:
    world = World()
    await world.apply()
    await world.settle()
    return world


def test_a_sentence_that_changes_often_is_written_every_fifteen_seconds_and_in_the_end() -> None:
    async def work() -> None:
        world = await starting()
        for number in range(31):
            await stuck(world, f"0/{number} nodes are available")
            assert world.condition("ResourcesReady")["reason"] == "Unschedulable"
        assert patches(world) == 4
        asked = await world.settle()
        assert asked.requeue_seconds is None
        await stuck(world, "no node is left")
        again = (await world.settle()).requeue_seconds
        assert again is not None
        assert again <= 15
        world.now += timedelta(seconds=again)
        await world.settle()
        assert world.condition("ResourcesReady")["message"] == "no node is left"
        assert patches(world) == 5
        assert (await world.settle()).requeue_seconds is None

    run(work())


def test_another_reason_is_written_at_once_unless_it_was_told_a_moment_ago() -> None:
    async def work() -> None:
        world = await starting()
        await stuck(world, "pod 0 has no node")
        await stuck(world, "pod 1 has no volume", "VolumeNotReady")
        assert world.condition("ResourcesReady")["reason"] == "VolumeNotReady"
        assert patches(world) == 3
        for _ in range(5):
            await stuck(world, "pod 0 has no node")
            await stuck(world, "pod 1 has no volume", "VolumeNotReady")
        assert patches(world) == 3
        await stuck(world, "", "")
        assert world.condition("ResourcesReady")["reason"] == "Provisioning"
        assert patches(world) == 4

    run(work())


@pytest.mark.parametrize("nodes_run_after", [1, 7, 14], ids="after {}".format)
def test_two_patches_lead_to_running_if_it_trains_within_15_seconds(nodes_run_after: int) -> None:
    async def work() -> None:
        world = await starting()
        assert patches(world) == 1
        assert world.condition("ResourcesReady")["reason"] == "Provisioning"
        await look(world, nodes_run_after - 1)
        await world.play(1, phase="Running", ready="1")
        await look(world, 1)
        assert patches(world) == 1
        await world.play(1, phase="Running", ready="1", step="1")
        await look(world, 1)
        assert world.job["status"]["phase"] == "Running"
        assert world.job["status"]["nodes"]["ready"] == 1
        assert patches(world) == 2

    run(work())


@pytest.mark.parametrize(
    ("nodes_run_after", "num_patches"),
    [(1, 2), (7, 2), (20, 2), pytest.param(40, 3, id="after the handle was written")],
)
def test_nodes_that_run_are_reported_15_seconds_after_the_opening_while_the_model_loads(
    nodes_run_after: int, num_patches: int
) -> None:
    async def work() -> None:
        world = await starting()
        await look(world, nodes_run_after - 1)
        await world.play(1, phase="Running", ready="1")
        delayed = await world.settle()
        if nodes_run_after < 15:
            assert patches(world) == 1
            assert delayed.requeue_seconds is not None
            assert delayed.requeue_seconds <= 15 - (nodes_run_after - 1)
        await look(world, max(1, 16 - nodes_run_after))
        ready = world.condition("ResourcesReady")
        assert (ready["status"], ready["reason"]) == ("True", "Starting")
        assert world.job["status"]["nodes"]["ready"] == 1
        assert world.condition("Running")["status"] == "False"
        await look(world, 60)
        assert patches(world) == num_patches
        await world.play(1, phase="Running", ready="1", step="1")
        await look(world, 1)
        assert world.job["status"]["phase"] == "Running"
        assert patches(world) == num_patches + 1

    run(work())


def test_handle_is_written_30_seconds_after_the_opening_if_nothing_else_is() -> None:
    async def work() -> None:
        world = await starting()
        await look(world, 29)
        assert "backendRef" not in world.job["status"]
        assert patches(world) == 1
        again = (await world.settle()).requeue_seconds
        assert again is not None
        assert again <= 1
        await look(world, 1)
        assert world.job["status"]["backendRef"]["name"] == "ns/tiny-1"
        assert patches(world) == 2
        await look(world, 600)
        assert patches(world) == 2

    run(work())


def test_delay_of_a_report_survives_a_new_leader() -> None:
    async def work() -> None:
        world = await starting()
        await world.play(1, phase="Running", ready="1")
        await look(world, 10)
        world.start_process()
        await look(world, 4)
        assert patches(world) == 1
        await look(world, 2)
        assert world.condition("ResourcesReady")["status"] == "True"

    run(work())


def test_nodes_of_a_service_are_reported_at_once() -> None:
    async def work() -> None:
        world = World()
        await world.apply(backend={"type": "fake"})
        await world.look_once()
        fake = world.backends.get("fake").backend
        assert isinstance(fake, FakeBackend)
        fake.run(1).script[:] = [Observation(AttemptPhase.PENDING)]
        await look(world, 1)
        assert world.condition("ResourcesReady")["reason"] == "Provisioning"
        fake.run(1).script[:] = [Observation(AttemptPhase.RUNNING, nodes_ready=1)]
        await look(world, 1)
        assert world.condition("ResourcesReady")["status"] == "True"

    run(work())


def test_that_a_job_runs_is_written_at_once_whatever_was_told_before() -> None:
    async def work() -> None:
        world = await starting()
        for number in range(3):
            await stuck(world, f"0/{number} nodes are available")
        await world.play(1, phase="Running", ready="1", step="1")
        await look(world, 1)
        assert world.job["status"]["phase"] == "Running"

    run(work())


def test_a_quota_whose_numbers_change_is_written_every_fifteen_seconds() -> None:
    async def work() -> None:
        world = World()
        for used in range(4):
            world.api.before = refusing(ForbiddenError(403, "Forbidden", f"quota: {used} used"))
            await (world.settle() if used else world.apply())
            look_again = (await world.settle()).requeue_seconds or 0.0
            assert 0.0 < look_again <= 30
        assert patches(world) == 2  # the opening, and why it cannot be created
        world.now += timedelta(seconds=look_again)
        await world.settle()
        assert world.condition("Stalled")["message"] == "quota: 3 used"
        assert patches(world) == 3

    run(work())

"""What keeps a job from running is told within seconds, and no more often than anybody reads."""

from datetime import timedelta
from typing import Any

import pytest

from fake_api import BeforeCall
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.errors import ApiError, ThrottledError, UnavailableError
from finetune_operator.kube.resources import CONFIG_MAPS, Resource
from kernel_world import KEY, World, nothing
from virtual_time import run

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
                again = (await world.reconciler.reconcile(KEY)).again_in_seconds or 1.0
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
        assert world.job["status"]["phase"] == "Pending"
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
        assert failed["message"].endswith(f"deadlines.{limit} 60: {HOOK}")

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


def test_what_keeps_a_job_from_being_suspended_is_told() -> None:
    async def work() -> None:
        world = World()
        await world.apply(model__revision="lingers")
        await look(world, 8)
        await world.change(suspend=True)
        await look(world, 1)
        assert world.job["status"]["phase"] == "Suspending"
        assert "a pod is still there" in world.condition("Suspended")["message"]

    run(work())

"""A plugin whose verbs raise any error at all: told in its jobs, and taken up once it is mended."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta

import pytest

from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.resources import FINE_TUNE_JOBS
from support.kernel.fake_backend import FakeBackend, ended
from support.kernel.kernel_world import KEY, Crash, World
from support.kernel.virtual_time import run

FAULT = "spec.backend.type fake failed (RuntimeError: a fault); the operator's log has the"


class FaultyWorld(World):
    """A cluster with one job, whose attempts outlive the operator's process.

    Attributes:
        fake: Its backend.
    """

    def __init__(self) -> None:
        self.fake = FakeBackend()
        super().__init__()

    def given(self, context: BackendContext) -> Mapping[str, Backend]:
        return {"fake": self.fake}

    def fail(self, verb: str) -> None:
        """Have the verb raise from now on."""
        self.fake.errors[verb] = [RuntimeError("a fault")] * 99  # type: ignore[list-item]

    def mend(self) -> None:
        """Have every verb work again."""
        self.fake.errors.clear()

    async def work(self, times: int = 8) -> None:
        """Reconcile every few seconds; an error is followed by another try."""
        for _ in range(times):
            self.now += timedelta(seconds=5)
            await self.catch_up()
            with suppress(FineTuneError):
                await self.reconciler.reconcile(KEY)

    def stalled(self) -> str:
        """Return the message of a job that is Stalled for a fault of its backend."""
        found = self.condition("Stalled")
        assert (found["status"], found["reason"]) == ("True", "BackendFailed")
        return str(found["message"])


async def running() -> FaultyWorld:
    world = FaultyWorld()
    await world.apply(backend={"type": "fake"})
    await world.work()
    return world


async def suspend(world: FaultyWorld) -> None:
    await world.change(suspend=True)


async def complete(world: FaultyWorld) -> None:
    world.fake.run(1).script[:] = [ended()]


@pytest.mark.parametrize(
    ("verb", "happens", "said", "phase"),
    [
        pytest.param("cancel", suspend, "attempt 1 cannot be cancelled", "Suspended"),
        pytest.param(
            "collect", complete, "the exported artifacts cannot be collected", "Succeeded"
        ),
    ],
)
def test_a_fault_at_the_end_of_an_attempt_is_told_until_it_is_mended(
    verb: str, happens: Callable[[FaultyWorld], Awaitable[None]], said: str, phase: str
) -> None:
    async def work() -> None:
        world = await running()
        world.fail(verb)
        await happens(world)
        await world.work()
        message = world.stalled()
        assert message.startswith(said)
        assert FAULT in message
        world.mend()
        await world.work()
        assert world.job["status"]["phase"] == phase

    run(work())


@pytest.mark.parametrize("verb", ["observe", "cancel"])
def test_a_fault_at_the_end_of_a_deleted_job_is_told_with_the_finalizer(verb: str) -> None:
    async def work() -> None:
        world = await running()
        world.fail(verb)
        await world.api.delete(FINE_TUNE_JOBS, KEY.name, KEY.namespace)
        await world.work()
        message = world.stalled()
        assert message.startswith(FAULT)
        assert "then remove the finalizer finetune.dev/backend" in message
        world.mend()
        await world.work()
        assert world.api.objects(FINE_TUNE_JOBS) == []

    run(work())


def test_a_backend_that_cannot_name_its_folders_is_told_and_starts_nothing() -> None:
    class Nameless(FakeBackend):
        def writes(self, job: object) -> object:  # type: ignore[override]
            raise RuntimeError("a fault")

    async def work() -> None:
        world = FaultyWorld()
        world.fake = Nameless()
        world.start_process()
        await world.apply(backend={"type": "fake"})
        await world.work()
        assert world.stalled().startswith(FAULT)
        assert world.fake.runs == {}

    run(work())


def test_a_backend_that_cannot_forget_keeps_no_finished_job() -> None:
    class Unforgetting(FakeBackend):
        def forget(self, job_uid: str) -> None:
            raise RuntimeError("a fault")

    async def work() -> None:
        world = FaultyWorld()
        world.fake = Unforgetting()
        world.start_process()
        await world.apply(backend={"type": "fake"})
        await world.work()
        await complete(world)
        await world.work()
        assert world.job["status"]["phase"] == "Succeeded"
        assert world.job["metadata"]["finalizers"] == []

    run(work())


def test_a_deleted_job_that_cannot_be_read_stays_while_an_attempt_of_it_may_exist() -> None:
    async def work() -> None:
        world = FaultyWorld()
        await world.apply(backend={"type": "fake"})
        submit = world.fake.submit

        async def die(request: object) -> object:
            await submit(request)  # type: ignore[arg-type]
            raise Crash

        world.fake.submit = die  # type: ignore[method-assign,assignment]
        with pytest.raises(Crash):
            await world.look_once()
        world.fake.submit = submit  # type: ignore[method-assign]
        readable = world.job["spec"]["training"]["globalBatchSize"]
        await world.change(training={"globalBatchSize": "many"})
        world.start_process()
        await world.api.delete(FINE_TUNE_JOBS, KEY.name, KEY.namespace)
        await world.work()
        assert world.stalled().startswith(
            "attempt 1 may exist, and cannot be searched for while the spec cannot be read; the "
            "job stays until its attempt has ended. Fix that, or make sure that no part of the "
            "attempt runs, and then remove the finalizer finetune.dev/backend"
        )
        await world.change(training={"globalBatchSize": readable})
        await world.work()
        assert world.api.objects(FINE_TUNE_JOBS) == []
        assert world.fake.alive == []

    run(work())

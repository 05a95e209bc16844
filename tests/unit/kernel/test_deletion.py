"""What the end of an attempt waits for whose backend answers late, or never."""

from datetime import timedelta
from importlib.metadata import EntryPoint

import pytest

from finetune_operator.backends import registry
from finetune_operator.backends.base import Attempt
from finetune_operator.errors import TransientError
from finetune_operator.kernel.queue import Result
from finetune_operator.kube.resources import EVENTS, FINE_TUNE_JOBS
from finetune_operator.planner.plan import make_plan
from support.kernel.configmap_backend import PatientBackend
from support.kernel.fake_backend import PREEMPTED, RUNNING, ended
from support.kernel.kernel_world import KEY, POINTS, World
from support.kernel.virtual_time import run

GRACE_SECONDS = 120
BUSY = TransientError("too many requests")
PATIENT = EntryPoint("patient", "support.kernel.configmap_backend:PatientBackend", registry.GROUP)


class PatientWorld(World):
    """A cluster with one job whose attempts are the backend's that answers late."""

    def __init__(self) -> None:
        super().__init__()
        self.start_process([*POINTS, PATIENT])
        made = self.backends.get("patient").backend
        assert isinstance(made, PatientBackend)
        self.backend = made

    async def look_or_fail(self) -> Result | None:
        """Reconcile once; None where that has failed."""
        try:
            return await self.look_once()
        except TransientError:
            return None

    async def look_for(self, seconds: float) -> None:
        """Reconcile every few seconds for so long."""
        end = self.now + timedelta(seconds=seconds)
        while self.now < end:
            self.now += timedelta(seconds=5)
            await self.look_or_fail()

    async def delete(self) -> None:
        await self.api.delete(FINE_TUNE_JOBS, KEY.name, KEY.namespace)
        await self.look_or_fail()

    async def land(self) -> None:
        """Let a submit have its effect that was sent without an answer."""
        self.backend.errors["submit"] = []
        index = self.reconciler._index.get(KEY)
        assert index is not None
        await self.backend.submit(self.backend.render(make_plan(index.job), Attempt(1)))

    @property
    def is_there(self) -> bool:
        return bool(self.api.objects(FINE_TUNE_JOBS))

    @property
    def told(self) -> list[str]:
        return [one["reason"] for one in self.api.objects(EVENTS)]


async def running() -> PatientWorld:
    world = PatientWorld()
    await world.apply(backend={"type": "patient"})
    await world.settle()
    assert len(world.backend.alive) == 1
    return world


async def unanswered() -> PatientWorld:
    """Return a world whose job's attempt may have been submitted, or may yet be."""
    world = PatientWorld()
    world.backend.errors["submit"] = [BUSY] * 3
    await world.apply(backend={"type": "patient"})
    for _ in range(3):
        await world.look_or_fail()
    assert world.job["status"]["attempts"][0]["number"] == 1
    assert "backendRef" not in world.job["status"]
    return world


def test_a_cancel_that_is_never_confirmed_lets_the_job_go_and_an_event_says_what_may_run() -> None:
    async def work() -> None:
        world = await running()
        world.backend.after_cancel = RUNNING
        await world.delete()
        await world.look_for(GRACE_SECONDS + 290)
        assert world.is_there
        assert "CancelUnconfirmed" not in world.told
        await world.look_for(20)
        assert not world.is_there
        (event,) = (o for o in world.api.objects(EVENTS) if o["reason"] == "CancelUnconfirmed")
        assert "Fake ns/tiny-1 may still run" in event["message"]
        assert event["type"] == "Warning"

    run(work())


@pytest.mark.parametrize("answer", ["an error", "not accepted"])
def test_a_cancel_that_is_not_accepted_keeps_the_job_and_is_told_with_the_cure(answer: str) -> None:
    async def work() -> None:
        world = await running()
        if answer == "an error":
            world.backend.errors["cancel"] = [BUSY] * 10_000
        world.backend.accepts_cancel = answer == "an error"
        await world.delete()
        assert world.condition("Stalled")["status"] == "False"
        await world.look_for(3600)
        assert world.is_there
        assert len(world.backend.alive) == 1
        stalled = world.condition("Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "BackendFailed")
        assert "remove the finalizer finetune.dev/backend" in stalled["message"]
        world.backend.errors["cancel"], world.backend.accepts_cancel = [], True
        await world.settle()
        assert not world.is_there
        assert world.backend.alive == []

    run(work())


def test_an_attempt_that_appears_after_its_job_was_deleted_is_ended() -> None:
    async def work() -> None:
        world = await unanswered()
        await world.delete()
        await world.look_for(60)
        assert world.is_there
        await world.land()
        await world.look_for(10)
        assert not world.is_there
        assert world.backend.alive == []

    run(work())


def test_a_deleted_job_goes_once_no_attempt_can_appear_any_more() -> None:
    async def work() -> None:
        world = await unanswered()
        await world.delete()
        look = await world.look_or_fail()
        assert look is not None
        assert look.requeue_seconds == 5.0
        await world.look_for(GRACE_SECONDS + 140)
        assert world.is_there
        await world.look_for(20)
        assert not world.is_there

    run(work())


def test_an_attempt_that_appears_after_its_job_was_suspended_is_ended() -> None:
    async def work() -> None:
        world = await unanswered()
        await world.change(suspend=True)
        await world.look_for(60)
        assert world.job["status"]["phase"] == "Suspending"
        await world.land()
        await world.look_for(10)
        assert world.backend.alive == []
        assert world.job["status"]["phase"] == "Suspended"

    run(work())


def test_a_job_whose_attempt_never_appears_is_suspended_in_the_end() -> None:
    async def work() -> None:
        world = await unanswered()
        await world.change(suspend=True)
        await world.look_for(GRACE_SECONDS + 160)
        assert world.job["status"]["phase"] == "Suspended"
        assert len(world.backend.runs) == 0

    run(work())


def test_an_attempt_that_is_submitted_again_after_a_resume_may_appear_late_again() -> None:
    async def work() -> None:
        world = await unanswered()
        await world.change(suspend=True)
        await world.look_for(GRACE_SECONDS + 400)
        world.backend.errors["submit"] = [BUSY]
        await world.change(suspend=False)
        await world.look_or_fail()
        await world.delete()
        await world.look_for(60)
        assert world.is_there
        await world.land()
        await world.look_for(10)
        assert not world.is_there
        assert world.backend.alive == []

    run(work())


@pytest.mark.parametrize("appears", [True, False])
def test_a_job_fails_for_a_deadline_once_its_attempt_cannot_appear_any_more(appears: bool) -> None:
    async def work() -> None:
        world = PatientWorld()
        world.backend.errors["submit"] = [BUSY] * 1000
        await world.apply(backend={"type": "patient"}, deadlines__activeSeconds=60)
        await world.look_for(180)
        assert world.job["status"]["phase"] == "Starting"
        assert world.job["metadata"]["finalizers"] == ["finetune.dev/backend"]
        before = world.writes
        await world.look_for(15)
        assert world.writes == before
        if appears:
            await world.land()
        await world.look_for(60)
        assert world.job["status"]["phase"] == "Failed"
        assert "deadlines.activeSeconds 60" in world.condition("Failed")["message"]
        assert world.backend.alive == []
        assert len(world.backend.runs) == appears

    run(work())


def test_an_attempt_that_appears_after_its_deadline_was_raised_has_its_whole_grace() -> None:
    async def work() -> None:
        world = PatientWorld()
        world.backend.errors["submit"] = [BUSY] * 1000
        await world.apply(backend={"type": "patient"}, deadlines__activeSeconds=60)
        await world.look_for(90)
        assert "stopDeadline" in world.job["status"]["attempts"][0]
        await world.change(deadlines={"activeSeconds": 6000})
        await world.land()
        await world.look_for(10)
        await world.change(suspend=True)
        await world.look_or_fail()
        (until,) = world.backend.run(1).cancels
        assert until >= world.now + timedelta(seconds=GRACE_SECONDS - 1)

    run(work())


def test_a_finished_job_has_no_finalizer_and_goes_at_once() -> None:
    async def work() -> None:
        world = await running()
        assert world.job["metadata"]["finalizers"] == ["finetune.dev/backend"]
        world.backend.run(1).script[:] = [ended()]
        await world.settle()
        assert world.job["status"]["phase"] == "Succeeded"
        assert not world.job["metadata"].get("finalizers")
        await world.api.delete(FINE_TUNE_JOBS, KEY.name, KEY.namespace)
        assert not world.is_there

    run(work())


def test_an_attempt_that_cannot_be_told_to_stop_is_told_once_and_no_longer_than_that() -> None:
    async def work() -> None:
        world = await running()
        world.backend.errors["cancel"] = [BUSY] * 10_000
        await world.change(suspend=True)
        await world.look_for(60)
        stalled = world.condition("Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "BackendFailed")
        assert "attempt 1 cannot be cancelled" in stalled["message"]
        assert world.job["status"]["phase"] == "Suspending"
        before = world.writes
        await world.look_for(60)
        assert world.writes == before
        world.backend.errors["cancel"] = []
        await world.settle()
        assert world.job["status"]["phase"] == "Suspended"
        assert world.condition("Stalled")["status"] == "False"

    run(work())


def test_an_attempt_that_could_not_be_told_to_stop_is_not_told_of_the_next_one() -> None:
    async def work() -> None:
        world = await running()
        world.backend.errors["cancel"] = [BUSY] * 10_000
        await world.change(suspend=True)
        await world.look_for(60)
        assert world.condition("Stalled")["status"] == "True"
        world.backend.run(1).script[:] = [PREEMPTED]
        await world.look_for(10)
        await world.change(suspend=False)
        await world.look_for(60)
        assert world.job["status"]["attempt"] == 2
        assert world.condition("Stalled")["status"] == "False"

    run(work())


def test_what_cannot_be_collected_is_told_and_the_job_is_complete_once_it_is() -> None:
    async def work() -> None:
        world = await running()
        world.backend.errors["collect"] = [BUSY] * 10_000
        world.backend.run(1).artifacts = ["file:///a"]
        world.backend.run(1).script[:] = [ended()]
        await world.look_for(60)
        assert "the exported artifacts cannot be collected" in world.condition("Stalled")["message"]
        assert world.condition("Stalled")["status"] == "True"
        before = world.writes
        await world.look_for(60)
        assert world.writes == before
        world.backend.errors["collect"] = []
        await world.settle()
        assert world.job["status"]["phase"] == "Succeeded"
        assert world.job["status"]["artifacts"] == ["file:///a"]

    run(work())

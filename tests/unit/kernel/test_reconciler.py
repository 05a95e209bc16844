"""One job's story on a server in memory, told again with a crash or a fault at every write."""

from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import Attempt
from finetune_operator.errors import BackendError
from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.resources import CONFIG_MAPS, EVENTS, FINE_TUNE_JOBS, Object, Resource
from finetune_operator.planner.plan import make_plan
from support.kernel.fake_backend import FakeBackend
from support.kernel.kernel_world import KEY, QUOTA_SENTENCE, Crash, World, at_write, nothing
from support.kernel.virtual_time import run

Chapter = Callable[[World], Coroutine[Any, Any, None]]


async def _begin(world: World) -> None:
    await world.apply()


async def _first_runs(world: World) -> None:
    await world.play(1, phase="Running", ready="1", step="1")


async def _first_fails(world: World) -> None:
    await world.play(1, phase="Failed", code="137")


async def _first_is_gone(world: World) -> None:
    await world.play(1, gone="yes")


async def _second_runs(world: World) -> None:
    await world.play(2, phase="Running", ready="1", step="2")


async def _suspend(world: World) -> None:
    await world.change(suspend=True)


async def _resume(world: World) -> None:
    await world.change(suspend=False)


async def _third_runs(world: World) -> None:
    await world.play(3, phase="Running", ready="1", step="5")


async def _third_completes(world: World) -> None:
    await world.play(3, phase="Succeeded", code="0", step="10", gone="yes")


STORY: tuple[Chapter, ...] = (
    _begin,
    _first_runs,
    _first_fails,
    _first_is_gone,
    _second_runs,
    _suspend,
    _resume,
    _third_runs,
    _third_completes,
)


async def tell(world: World) -> World:
    """Play the whole story; a minute passes with each chapter."""
    for chapter in STORY:
        quiet, world.api.before = world.api.before, nothing
        after, world.api.after = world.api.after, nothing
        await chapter(world)
        world.api.before, world.api.after = quiet, after
        world.now += timedelta(minutes=1)
        await world.settle()
    return world


def told(world: World) -> Object:
    """Return what must be the same in every telling: names and versions differ."""
    job = world.job
    status = {**job["status"], "backendRef": {**job["status"]["backendRef"], "uid": ""}}
    ledger = status.pop("ledger")  # what nobody had written before a crash may count otherwise
    age = sum(ledger["time"].values())
    counted = (age, ledger["highestStep"], ledger["restarts"])
    return {"status": status, "attempts": world.attempts, "counted": counted}


async def undisturbed() -> World:
    return await tell(World())


def test_the_undisturbed_story_ends_well_with_few_writes() -> None:
    world = run(undisturbed())
    assert world.job["status"]["phase"] == "Succeeded"
    assert world.attempts == ["tiny-1", "tiny-2", "tiny-3"]
    assert world.most_alive == 1
    by_the_user = 2
    patches = world.api.calls.by_kind[("patch", "finetunejobs", 200)]
    assert patches - by_the_user == 10
    assert {one["reason"] for one in world.api.objects(EVENTS)} == {
        "AttemptCreated",
        "Training",
        "WorkerLost",
        "SuspendedByUser",
        "Completed",
    }


AWAY = UnavailableError(0, "Timeout", "no answer in time")


@pytest.mark.parametrize("error", [Crash(), AWAY], ids=["crash", "no answer"])
@pytest.mark.parametrize("is_done", [False, True], ids=["before the write", "after the write"])
def test_a_fault_at_any_write_changes_nothing_in_the_end(
    error: BaseException, is_done: bool
) -> None:
    async def work() -> None:
        expected = await undisturbed()
        assert expected.writes > 20
        for number in range(1, expected.writes + 1):
            world = World()
            hook = at_write(number, error)
            if is_done:
                count = world.api.after
                world.api.after = lambda *call, c=count, h=hook: (c(*call), h(*call))[0]
            else:
                world.api.before = hook
            await tell(world)
            assert told(world) == told(expected), f"write {number}"
            assert world.most_alive == 1, f"write {number}"
            assert world.crashes == isinstance(error, Crash)

    run(work())


def test_looking_again_at_a_settled_job_writes_nothing() -> None:
    async def work() -> None:
        world = World()
        for chapter in STORY:
            await chapter(world)
            await world.settle()
            before = world.writes
            for _ in range(3):
                world.start_process()
                await world.settle()
            assert world.writes == before, chapter.__name__

    run(work())


def test_a_change_between_the_look_and_the_write_is_looked_at_first() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        await world.play(1, phase="Failed", code="137", gone="yes")
        await world.catch_up()
        await world.change(suspend=True)
        assert (await world.reconciler.reconcile(KEY)).requeue_seconds == 0
        assert world.attempts == ["tiny-1"]
        await world.settle()
        assert world.job["status"]["phase"] == "Suspended"
        assert world.attempts == ["tiny-1"]

    run(work())


@pytest.mark.parametrize("crashes", [False, True])
def test_job_suspended_before_its_attempt_runs_is_stopped(crashes: bool) -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        assert world.job["status"]["attempt"] == 1
        if crashes:
            world.start_process()
        await world.change(suspend=True)
        await world.settle()
        status = world.job["status"]
        assert (status["phase"], status["attempt"]) == ("Suspended", 1)
        assert world.condition("Accepted")["observedGeneration"] == 1
        assert world.condition("Suspended")["observedGeneration"] == 2
        assert world.api.objects(CONFIG_MAPS)[0]["data"]["gone"]

    run(work())


def test_status_opens_each_attempt_before_its_child_is_created() -> None:
    def is_opened(verb: str, resource: Resource, name: str) -> None:
        if (verb, resource) == ("create", CONFIG_MAPS):
            assert name == f"tiny-{world.job['status']['attempt']}"
            assert "endTime" not in world.job["status"]["attempts"][-1]
            opened.append(name)

    world, opened = World(), list[str]()
    world.api.before = is_opened
    run(tell(world))
    assert opened == ["tiny-1", "tiny-2", "tiny-3"]


def test_obstacle_of_a_start_is_reported_at_once() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        await world.play(1, phase="Pending", reason="Unschedulable", message="no node")
        await world.settle()
        assert world.condition("ResourcesReady")["message"] == "no node"

    run(work())


def test_refused_creation_is_reported_at_once() -> None:
    async def work() -> None:
        world = World()
        world.api.is_used_up = True
        await world.apply()
        await world.settle()
        assert world.condition("Stalled")["message"] == QUOTA_SENTENCE

    run(work())


def test_job_is_new_until_its_first_status_is_written() -> None:
    async def work() -> None:
        world = World()
        assert not world.reconciler.is_new(KEY)
        await world.apply()
        await world.catch_up()
        assert world.reconciler.is_new(KEY)
        await world.reconciler.reconcile(KEY)
        assert not world.reconciler.is_new(KEY)
        world.start_process()
        await world.catch_up()
        assert not world.reconciler.is_new(KEY)

    run(work())


def test_an_attempt_that_is_gone_as_soon_as_it_is_cancelled_is_looked_at_again() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        await world.change(suspend=True)
        await world.catch_up()
        # What cancelling changed is in the cache already, so no watch will tell of it.
        assert (await world.reconciler.reconcile(KEY)).requeue_seconds == 0
        await world.reconciler.reconcile(KEY)
        assert world.job["status"]["phase"] == "Suspended"

    run(work())


def test_a_quota_is_told_in_the_conditions_and_the_attempt_created_once_it_allows() -> None:
    async def work() -> None:
        world = World()
        world.api.is_used_up = True
        await world.apply()
        look = await world.settle()
        assert look.requeue_seconds is not None
        assert look.requeue_seconds <= 60
        assert world.condition("Stalled")["status"] == "True"
        ready = world.condition("ResourcesReady")
        assert (ready["status"], ready["reason"], ready["message"]) == (
            "False",
            "CreationFailed",
            QUOTA_SENTENCE,
        )
        assert world.condition("Accepted")["status"] == "True"
        before = world.writes
        await world.settle()
        assert world.writes == before
        world.api.is_used_up = False
        await world.settle()
        assert world.attempts == ["tiny-1"]
        await world.play(1, phase="Running", ready="1", step="1")
        await world.settle()
        assert world.condition("Stalled")["status"] == "False"

    run(work())


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("pendingSeconds", "PendingDeadlineExceeded"),
        ("activeSeconds", "ActiveDeadlineExceeded"),
    ],
)
def test_an_attempt_that_can_never_be_created_is_given_up_at_the_deadline(
    limit: str, reason: str
) -> None:
    async def work() -> None:
        world = World()
        world.api.is_used_up = True
        await world.apply(deadlines={limit: 60})
        await world.settle()
        assert world.condition("Stalled")["status"] == "True"
        world.now += timedelta(seconds=61)
        await world.settle()
        failed = world.condition("Failed")
        assert (failed["status"], failed["reason"]) == ("True", reason)
        assert f"deadlines.{limit} 60: {QUOTA_SENTENCE}; " in failed["message"]
        world.api.is_used_up = False
        await world.settle()
        assert world.attempts == []

    run(work())


async def blocked_then_suspended(**overrides: Any) -> World:
    world = World()
    world.api.is_used_up = True
    await world.apply(**overrides)
    await world.settle()
    assert world.condition("Stalled")["status"] == "True"
    await world.change(suspend=True)
    await world.settle()
    return world


def test_a_job_whose_attempt_could_not_be_created_is_suspended_and_resumed() -> None:
    async def work() -> None:
        world = await blocked_then_suspended()
        assert world.job["status"]["phase"] == "Suspended"
        assert world.condition("Suspended")["reason"] == "SuspendedByUser"
        assert world.condition("Stalled")["status"] == "False"
        await world.change(suspend=False)
        await world.settle()
        assert world.condition("Suspended")["reason"] == "Resumed"
        assert world.condition("Stalled")["message"] == QUOTA_SENTENCE
        assert world.condition("Stalled")["status"] == "True"
        world.api.is_used_up = False
        await world.settle()
        assert world.attempts == ["tiny-1"]

    run(work())


def test_a_job_that_was_suspended_without_an_attempt_has_its_whole_time_again() -> None:
    async def work() -> None:
        world = await blocked_then_suspended(deadlines={"pendingSeconds": 60, "activeSeconds": 90})
        world.now += timedelta(seconds=200)
        await world.settle()
        assert world.job["status"]["phase"] == "Suspended"
        await world.change(suspend=False)
        await world.settle()
        world.now += timedelta(seconds=59)
        await world.settle()
        assert world.job["status"]["phase"] == "Starting"
        world.now += timedelta(seconds=2)
        await world.settle()
        assert world.condition("Failed")["reason"] == "PendingDeadlineExceeded"

    run(work())


def test_what_is_wrong_with_a_job_by_the_time_it_is_resumed_is_told() -> None:
    async def work() -> None:
        world = await blocked_then_suspended()
        world.api.is_used_up = False
        await world.change(model={"revision": "forbidden"}, suspend=False)
        await world.settle()
        assert world.condition("Accepted")["message"].startswith("spec.model.revision forbidden")
        assert world.attempts == []
        await world.change(model={"revision": "main"})
        await world.settle()
        assert world.attempts == ["tiny-1"]

    run(work())


@pytest.mark.parametrize("was_blocked", [False, True], ids=["never refused", "refused, too"])
def test_an_attempt_that_is_created_after_its_job_was_suspended_is_stopped(
    was_blocked: bool,
) -> None:
    def unanswered(verb: str, resource: Resource, name: str) -> None:
        if (verb, resource) == ("create", CONFIG_MAPS):
            raise AWAY

    async def work() -> None:
        world = World()
        await world.apply()
        world.api.before = unanswered
        await world.catch_up()
        with pytest.raises(UnavailableError):
            await world.reconciler.reconcile(KEY)
        if was_blocked:
            world.api.before, world.api.is_used_up = nothing, True
            await world.settle()
            assert world.condition("Stalled")["status"] == "True"
        await world.change(suspend=True)
        await world.settle()
        assert world.job["status"]["phase"] == "Suspended"
        world.api.before, world.api.is_used_up = nothing, False
        plan = make_plan(FineTuneJob.model_validate(world.job))
        (late,) = world.backends.get("configmap").render(plan, Attempt(1)).objects
        await world.api.create(CONFIG_MAPS, late, "ns")
        await world.settle()
        (ended,) = world.api.objects(CONFIG_MAPS)
        assert ended["data"]["gone"] == "true"
        assert world.job["status"]["phase"] == "Suspended"
        await world.change(suspend=False)
        await world.settle()
        assert world.attempts == ["tiny-1", "tiny-2"]
        assert world.most_alive == 1

    run(work())


def test_a_job_is_not_told_to_be_suspended_while_an_attempt_runs_that_no_watch_told_of() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.catch_up()
        world.api.after = at_write(2, AWAY)  # the first one opens the attempt in the status
        with pytest.raises(UnavailableError):
            await world.reconciler.reconcile(KEY)
        assert world.attempts == ["tiny-1"]
        await world.change(suspend=True)
        listing = await world.api.list(FINE_TUNE_JOBS)
        world.cache(FINE_TUNE_JOBS).replace(listing.items, listing.resource_version)
        await world.reconciler.reconcile(KEY)
        assert world.job["status"]["phase"] == "Suspending"
        await world.settle()
        assert world.job["status"]["phase"] == "Suspended"
        (ended,) = world.api.objects(CONFIG_MAPS)
        assert ended["data"]["gone"] == "true"

    run(work())


def test_an_attempt_outside_the_cluster_that_nobody_wrote_down_is_stopped_by_suspending() -> None:
    async def work() -> None:
        world = World()
        await world.apply(backend={"type": "fake"})
        fake = world.backends.get("fake").backend
        assert isinstance(fake, FakeBackend)
        world.api.before = at_write(3, Crash())  # after its finalizer and its opening
        with pytest.raises(Crash):
            await world.look_once()
        assert [len(fake.alive), "backendRef" in world.job["status"]] == [1, False]
        await world.change(suspend=True)
        await world.settle()
        assert fake.alive == []
        assert len(fake.runs) == 1
        assert world.job["status"]["phase"] == "Suspended"

    run(work())


def test_deleting_a_job_that_was_suspended_without_an_attempt_leaves_nothing() -> None:
    async def work() -> None:
        world = await blocked_then_suspended()
        await world.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
        world.api.is_used_up = False
        assert (await world.settle()).requeue_seconds is None
        assert world.attempts == []

    run(work())


def test_a_fault_of_a_backend_is_told_in_the_conditions() -> None:
    async def work() -> None:
        world = World()
        await world.apply(model__revision="breaks")
        await world.settle()
        accepted = world.condition("Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "BackendFailed")
        assert "RuntimeError: a fault of the plugin" in accepted["message"]

    run(work())


def test_a_spec_that_cannot_be_read_is_told_and_mended() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.change(training={"globalBatchSize": "many"})
        await world.settle()
        assert world.condition("Accepted")["status"] == "False"
        assert world.condition("Accepted")["message"].startswith("spec.training.globalBatchSize")
        await world.change(training={"globalBatchSize": 4})
        await world.settle()
        assert world.attempts == ["tiny-1"]
        assert world.condition("Accepted")["status"] == "True"

    run(work())


@pytest.mark.parametrize("chapters", [0, 1], ids=["before its first status", "while it trains"])
def test_an_attempt_whose_spec_cannot_be_read_any_more_is_told_to_run_on(chapters: int) -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        for chapter in STORY[1 : 1 + chapters]:
            await chapter(world)
            await world.settle()
        before = world.api.objects(CONFIG_MAPS)
        await world.change(training={"globalBatchSize": "many"})
        await world.settle()
        told = world.job["status"]
        assert (told["attempt"], told["phase"]) == (1, ("Starting", "Running")[chapters])
        assert world.condition("Running")["status"] == ("False", "True")[chapters]
        for kind, status in (("Accepted", "False"), ("Ready", "False"), ("Stalled", "True")):
            assert world.condition(kind)["status"] == status
            assert "attempt 1 is left alone: it continues" in world.condition(kind)["message"]
        assert world.api.objects(CONFIG_MAPS) == before
        await world.change(training={"globalBatchSize": 4})
        await _first_runs(world)
        await world.settle()
        for kind, status in (("Accepted", "True"), ("Ready", "True"), ("Stalled", "False")):
            assert world.condition(kind)["status"] == status
        assert world.attempts == ["tiny-1"]

    run(work())


def test_of_a_job_that_was_suspended_without_an_attempt_nothing_is_told_to_run() -> None:
    async def work() -> None:
        world = await blocked_then_suspended()
        await world.change(training={"globalBatchSize": "many"})
        await world.settle()
        assert world.job["status"]["phase"] == "Pending"
        assert "runs on" not in world.condition("Accepted")["message"]
        world.api.is_used_up = False
        await world.change(training={"globalBatchSize": 4}, suspend=False)
        await world.settle()
        assert world.attempts == ["tiny-1"]
        assert world.condition("Suspended")["status"] == "False"

    run(work())


def test_a_running_attempt_is_left_alone_when_its_spec_would_be_refused_today() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        await _first_runs(world)
        await world.settle()
        before = world.api.objects(CONFIG_MAPS)
        await world.change(model={"revision": "forbidden"})
        await world.settle()
        assert world.job["status"]["phase"] == "Running"
        assert world.api.objects(CONFIG_MAPS) == before

    run(work())


def test_a_job_created_again_under_its_name_does_not_take_over_the_old_attempt() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        old = world.api.objects(CONFIG_MAPS)
        world.api.remove(FINE_TUNE_JOBS, "tiny", "ns")  # nothing is collected yet
        await world.apply()
        await world.settle()
        assert world.condition("Stalled")["status"] == "True"
        assert world.api.objects(CONFIG_MAPS) == old

    run(work())


def test_a_finished_job_is_deleted_when_its_time_is_over() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        await world.change(ttlSecondsAfterFinished=60)
        await world.play(1, phase="Succeeded", code="0", step="10", gone="yes")
        assert (await world.settle()).requeue_seconds == 60
        world.now += timedelta(seconds=60)
        await world.settle()
        assert world.api.objects(FINE_TUNE_JOBS) == []
        assert world.attempts == []

    run(work())


def test_a_job_outside_the_cluster_is_ended_before_it_may_go() -> None:
    async def work() -> None:
        world = World()
        await world.apply(backend={"type": "fake"})
        await world.settle()
        assert world.job["metadata"]["finalizers"] == ["finetune.dev/backend"]
        assert world.job["status"]["backendRef"]["kind"] == "Fake"
        await world.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
        await world.catch_up()
        cancelled = await world.reconciler.reconcile(KEY)
        assert cancelled.requeue_seconds is not None
        assert "deletionTimestamp" in world.job["metadata"]
        assert world.job["status"]["phase"] == "Deleting"
        assert "it remains until the attempt has ended" in world.condition("Ready")["message"]
        await world.settle()
        assert world.api.objects(FINE_TUNE_JOBS) == []

    run(work())


async def deleted(world: World, *finalizers: str) -> None:
    """Delete the job, which these finalizers keep, and look once."""
    await world.api.patch(
        FINE_TUNE_JOBS, "tiny", "ns", {"metadata": {"finalizers": list(finalizers)}}
    )
    await world.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
    await world.catch_up()
    await world.reconciler.reconcile(KEY)


def is_cancelled(world: World) -> bool:
    """Say whether the only attempt was told to stop."""
    (attempt,) = world.api.objects(CONFIG_MAPS)
    return bool(attempt["data"].get("code") == "75")


@pytest.mark.parametrize("finalizer", ["example.com/hold", "foregroundDeletion"])
def test_a_deleted_job_that_is_kept_stops_its_attempt_and_says_so(finalizer: str) -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        await _first_runs(world)
        await world.settle()
        await deleted(world, finalizer)
        assert is_cancelled(world)
        assert world.job["status"]["phase"] == "Deleting"
        assert world.condition("Running")["status"] == "True"
        assert world.condition("Ready")["status"] == "False"
        told = world.condition("Ready")["message"]
        assert "attempt 1 saves a checkpoint of its newest step and stops" in told
        whose = {"example.com/hold": finalizer, "foregroundDeletion": "--cascade=foreground"}
        assert whose[finalizer] in told

    run(work())


def test_a_deleted_job_whose_attempt_has_ended_names_the_finalizers_that_keep_it() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        await _first_runs(world)
        await deleted(world, "example.com/hold", "b.test/c")
        look = await world.settle()
        assert look.requeue_seconds is None
        assert world.condition("Running")["status"] == "False"
        assert world.job["status"]["attempts"][0]["failureClass"] == "Preempted"
        assert world.condition("Ready")["message"] == (
            "the job is being deleted: no attempt runs; it remains until finalizers "
            "example.com/hold, b.test/c are removed"
        )
        assert world.attempts == ["tiny-1"]

    run(work())


def test_a_deleted_job_whose_children_shall_stay_is_let_go() -> None:
    async def work() -> None:
        world = World()
        await world.apply()
        await world.settle()
        await _first_runs(world)
        await deleted(world, "orphan")
        assert not is_cancelled(world)

    run(work())


def test_a_deleted_job_that_was_never_accepted_is_not_told_to_be() -> None:
    async def work() -> None:
        world = World()
        await world.apply(model={"source": "hf://a/b", "revision": "forbidden"})
        await world.settle()
        await deleted(world, "example.com/hold")
        assert world.job["status"]["phase"] == "Deleting"
        assert world.condition("Accepted")["status"] == "False"
        assert world.condition("Stalled")["status"] == "False"

    run(work())


def test_a_job_outside_the_cluster_whose_attempt_can_never_be_created_may_go() -> None:
    async def work() -> None:
        world = World()
        await world.apply(backend={"type": "fake"})
        fake = world.backends.get("fake").backend
        assert isinstance(fake, FakeBackend)
        fake.errors["submit"] = [BackendError("the folder is another job's")] * 9
        await world.settle()
        assert world.condition("Stalled")["status"] == "True"
        await world.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
        await world.settle()
        assert world.api.objects(FINE_TUNE_JOBS) == []
        assert fake.runs == {}

    run(work())

"""One job's story on a server in memory, told again with a crash or a fault at every write."""

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from builders import manifest
from fake_api import FakeApi
from finetune_operator.api.validate import defaulted
from finetune_operator.backends import registry
from finetune_operator.backends.base import BackendContext
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.events import EventPoster
from finetune_operator.kernel.jobs import Backends
from finetune_operator.kernel.reconciler import Look, Reconciler
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.errors import ForbiddenError, UnavailableError
from finetune_operator.kube.resources import (
    CONFIG_MAPS,
    EVENTS,
    FINE_TUNE_JOBS,
    Object,
    Resource,
)
from virtual_time import run

KEY = Key("ns", "tiny")
START = datetime(2026, 1, 1, tzinfo=UTC)
POINTS = [
    EntryPoint("configmap", "configmap_backend:ConfigMapBackend", registry.GROUP),
    EntryPoint("fake", "finetune_operator.backends.fake:FakeBackend", registry.GROUP),
]
WRITES = ("create", "patch", "update", "delete")


class Crash(BaseException):
    """The process is gone."""


class World:
    """A cluster, its clock, and an operator process that may die."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.now = START
        self.writes = 0
        self.most_alive = 0
        self.crashes = 0
        self.start_process()
        self.api.after = self._count

    def start_process(self) -> None:
        """Begin with nothing but what the API server knows."""
        self.caches: dict[Resource, ObjectCache] = {}
        cluster = Cluster(self.api, self.cache)
        self.reconciler = Reconciler(
            self.api,
            self.cache(FINE_TUNE_JOBS),
            Backends(BackendContext(Path(), {}, cluster), POINTS),
            EventPoster(self.api, "test"),
            now=lambda: self.now,
        )

    def cache(self, resource: Resource) -> ObjectCache:
        return self.caches.setdefault(resource, ObjectCache(resource))

    def _count(self, verb: str, resource: Resource, name: str) -> None:
        self.writes += 1
        alive = [one for one in self.api.objects(CONFIG_MAPS) if "gone" not in one["data"]]
        self.most_alive = max(self.most_alive, len(alive))

    async def catch_up(self) -> None:
        """Let the watches deliver everything."""
        for resource in (FINE_TUNE_JOBS, CONFIG_MAPS):
            listing = await self.api.list(resource)
            self.cache(resource).replace(listing.items, listing.resource_version)

    async def settle(self) -> Look:
        """Look until nothing changes; whatever breaks off or dies is followed by another look."""
        for _ in range(60):
            before = self.writes
            try:
                await self.catch_up()
                look = await self.reconciler.reconcile(KEY)
            except FineTuneError:
                continue
            except Crash:
                self.crashes += 1
                self.start_process()
                continue
            if self.writes == before and look.again_in_seconds != 0:
                return look
        raise AssertionError("it does not settle")

    async def apply(self, **overrides: Any) -> None:
        fields = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
        fields |= {"backend": {"type": "configmap"}, **overrides}
        made = defaulted(manifest(**fields))
        await self.api.create(FINE_TUNE_JOBS, made, "ns")

    async def change(self, **spec: Any) -> None:
        await self.api.patch(FINE_TUNE_JOBS, "tiny", "ns", {"spec": spec})

    async def play(self, number: int, **data: str) -> None:
        await self.api.patch(CONFIG_MAPS, f"tiny-{number}", "ns", {"data": data})

    @property
    def job(self) -> Object:
        (made,) = self.api.objects(FINE_TUNE_JOBS)
        return made

    def condition(self, kind: str) -> Object:
        found: Object = next(one for one in self.job["status"]["conditions"] if one["type"] == kind)
        return found

    @property
    def attempts(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.api.objects(CONFIG_MAPS)]


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
        quiet, world.api.before = world.api.before, _nothing
        after, world.api.after = world.api.after, _nothing
        await chapter(world)
        world.api.before, world.api.after = quiet, after
        world.now += timedelta(minutes=1)
        await world.settle()
    return world


def _nothing(verb: str, resource: Resource, name: str) -> None:
    """Let it happen."""


def told(world: World) -> Object:
    """Return what must be the same in every telling: names and versions differ."""
    job = world.job
    status = {**job["status"], "backendRef": {**job["status"]["backendRef"], "uid": ""}}
    return {"status": status, "attempts": world.attempts}


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


def at_write(number: int, error: BaseException) -> Callable[[str, Resource, str], None]:
    """Return a hook that raises at the write of that number, once."""
    seen = 0

    def hook(verb: str, resource: Resource, name: str) -> None:
        nonlocal seen
        if verb in WRITES:
            seen += 1
            if seen == number:
                raise error

    return hook


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
        await world.catch_up()
        await world.change(suspend=True)
        assert (await world.reconciler.reconcile(KEY)).again_in_seconds == 0
        assert world.attempts == []
        await world.settle()
        assert world.job["status"]["phase"] == "Suspended"
        assert world.attempts == []

    run(work())


def test_a_quota_is_told_in_the_conditions_and_the_attempt_created_once_it_allows() -> None:
    sentence = "configmaps is forbidden: exceeded quota: team"

    def quota(verb: str, resource: Resource, name: str) -> None:
        if (verb, resource) == ("create", CONFIG_MAPS):
            raise ForbiddenError(403, "Forbidden", sentence)

    async def work() -> None:
        world = World()
        world.api.before = quota
        await world.apply()
        look = await world.settle()
        assert look.again_in_seconds is not None
        assert look.again_in_seconds <= 60
        assert world.condition("Stalled")["status"] == "True"
        ready = world.condition("ResourcesReady")
        assert (ready["status"], ready["reason"], ready["message"]) == (
            "False",
            "CreationFailed",
            sentence,
        )
        assert world.condition("Accepted")["status"] == "True"
        before = world.writes
        await world.settle()
        assert world.writes == before
        world.api.before = _nothing
        await world.settle()
        assert world.attempts == ["tiny-1"]
        await world.play(1, phase="Running", ready="1", step="1")
        await world.settle()
        assert world.condition("Stalled")["status"] == "False"

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
        assert (await world.settle()).again_in_seconds == 60
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
        cancelled = await world.settle()
        assert cancelled.again_in_seconds is not None
        assert "deletionTimestamp" in world.job["metadata"]
        await world.settle()
        assert world.api.objects(FINE_TUNE_JOBS) == []

    run(work())

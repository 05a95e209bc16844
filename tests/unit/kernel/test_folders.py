"""Several jobs that would write one folder: the first has it, and the others are told of it."""

import json
import random
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.api.validation import defaulted
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, Object, Resource
from support.api.builders import manifest
from support.kernel.kernel_world import PLAYS, World, at_write, nothing
from support.kernel.virtual_time import run

OUT = "pvc://models/x"
INSIDE = "pvc://models/x/run"
APART = "pvc://models/y"
AWAY = UnavailableError(0, "Timeout", "no answer in time")


class Jobs(World):
    """A `World` of several jobs, of which a test says who is looked at when."""

    async def add(self, name: str, uri: str = OUT, **overrides: Any) -> None:
        fields: dict[str, Any] = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
        fields |= {"backend": {"type": "configmap"}, "output__uri": uri, **overrides}
        made = defaulted(manifest(name=name, **fields))
        await self.api.create(FINE_TUNE_JOBS, made, "ns")
        self.now += timedelta(seconds=1)

    async def look(self, *names: str) -> None:
        """Reconcile jobs in this order, and whom that wakes, until nothing follows."""
        await self.catch_up()
        for name in names:
            await self._look(Key("ns", name))
        while self.woken:
            await self._look(self.woken.pop(0))

    async def _look(self, key: Key) -> None:
        for _ in range(5):
            await self.catch_up()
            try:
                again = (await self.reconciler.reconcile(key)).requeue_seconds
            except FineTuneError:
                continue
            if again != 0:
                return

    async def spec(self, name: str, **spec: Any) -> None:
        await self.api.patch(FINE_TUNE_JOBS, name, "ns", {"spec": spec})

    async def plays(self, name: str, what: str) -> None:
        await self.api.patch(CONFIG_MAPS, name, "ns", {"data": PLAYS[what]})

    def status(self, name: str) -> Object:
        made = {one["metadata"]["name"]: one for one in self.api.objects(FINE_TUNE_JOBS)}
        found: Object = made[name].get("status") or {}
        return found

    def rejection(self, name: str) -> str:
        """Return what the job is Stalled for, and empty where it is not."""
        for one in self.status(name).get("conditions", ()):
            if (one["type"], one["status"]) == ("Stalled", "True"):
                assert one["reason"] == "FolderInUse"
                return str(one["message"])
        return ""


def story(work: Any) -> None:
    async def play() -> None:
        await work(Jobs())

    run(play())


@pytest.mark.parametrize("uri", [OUT, INSIDE, "pvc://models", "pvc://models//x/"])
def test_the_second_job_of_a_folder_is_stalled_with_the_name_of_the_first(uri: str) -> None:
    async def work(world: Jobs) -> None:
        await world.add("first", checkpoint__uri=APART)
        await world.add("second", uri)
        await world.look("first", "second", "second")
        assert world.attempts == ["first-1"]
        message = world.rejection("second")
        assert message.startswith(f"spec.output.uri {uri} ")
        assert f"{OUT}, spec.output.uri of the job ns/first" in message or uri == OUT
        assert "ns/first" in message
        assert world.status("second")["phase"] == "Pending"
        world.now += timedelta(seconds=10)
        await world.look("first")
        assert world.status("first")["folders"] == [APART, OUT]

    story(work)


@pytest.mark.parametrize("uri", [OUT, INSIDE, "pvc://models"])
def test_a_job_of_another_namespace_is_not_named(uri: str) -> None:
    async def work(world: Jobs) -> None:
        await world.add("first")
        other = defaulted(
            manifest(
                name="second", metadata__namespace="other", model__source="hf://a/b",
                dataset__source="hf://a/c", backend={"type": "configmap"}, output__uri=uri,
            )
        )  # fmt: skip
        await world.api.create(FINE_TUNE_JOBS, other, "other")
        await world.look("first")
        await world._look(Key("other", "second"))
        assert world.rejection("second").startswith(
            f"spec.output.uri {uri} is, holds or is inside a folder of a job in another namespace,"
        )
        assert "first" not in json.dumps(world.status("second")).replace("its first job", "")

    story(work)


@pytest.mark.parametrize("end", ["completes", "finds bad data", "runs"])
def test_only_its_deletion_frees_a_folder_however_the_job_ended(end: str) -> None:
    async def work(world: Jobs) -> None:
        await world.add("first")
        await world.add("second")
        await world.look("first", "second")
        await world.plays("first-1", end)
        await world.look("first", "second")
        world.start_process()
        await world.look("second", "first", "second")
        assert world.rejection("second")
        await world.api.delete(FINE_TUNE_JOBS, "first", "ns")
        await world.look("first")  # it wakes the second
        assert world.attempts == ["second-1"]
        assert not world.rejection("second") or not world.status("second")

    story(work)


def test_a_job_that_only_reads_a_folder_is_not_kept_from_it() -> None:
    async def work(world: Jobs) -> None:
        await world.add("first")
        reads = {"model__source": OUT, "checkpoint__resume_from": f"{OUT}/step-3"}
        await world.add("second", APART, **reads)
        await world.look("first", "second")
        assert world.attempts == ["first-1", "second-1"]

    story(work)


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_of_two_newcomers_the_older_goes_first_whoever_is_looked_at(order: tuple[str, str]) -> None:
    async def work(world: Jobs) -> None:
        await world.add("old")
        await world.add("new")
        await world.look(*order)
        assert world.attempts == ["old-1"]
        assert "ns/old" in world.rejection("new")

    story(work)


@pytest.mark.parametrize("flaw", [{"model.revision": "forbidden"}, {"suspend": True}])
def test_who_cannot_start_keeps_nobody_waiting_and_waits_in_turn(flaw: dict[str, Any]) -> None:
    async def work(world: Jobs) -> None:
        await world.add("old", **flaw)
        await world.add("new")
        await world.look("new", "old")
        assert world.attempts == ["new-1"]
        await world.spec("old", suspend=False, model={"revision": None})
        await world.look("old")
        assert "ns/new" in world.rejection("old")
        assert world.attempts == ["new-1"]

    story(work)


def test_of_two_that_wait_the_older_goes_on_when_the_first_is_gone() -> None:
    async def work(world: Jobs) -> None:
        await world.add("first")
        await world.add("second")
        await world.add("third")
        await world.look("first", "third", "second")
        await world.api.delete(FINE_TUNE_JOBS, "first", "ns")
        world.now += timedelta(seconds=30)  # else other words are told later
        await world.look("first")
        assert world.attempts == ["second-1"]
        assert "ns/second" in world.rejection("third")

    story(work)


def test_a_changed_spec_frees_a_folder_and_takes_none_from_a_younger_job() -> None:
    async def work(world: Jobs) -> None:
        await world.add("old", APART)
        await world.add("young")
        await world.look("old", "young")
        await world.plays("old-1", "runs")
        await world.spec("old", output={"uri": OUT}, suspend=True)
        await world.add("early", APART)
        await world.look("early")
        assert "ns/old" in world.rejection("early"), "its attempt still writes there"
        await world.look("old")  # which ends it, and wakes the one that waits
        assert world.attempts == ["early-1", "old-1", "young-1"]
        await world.spec("old", suspend=False)
        world.start_process()  # who remembers nothing comes to the same answer
        await world.look("old", "young")
        assert "ns/young" in world.rejection("old")
        assert not world.rejection("young")
        assert world.attempts == ["early-1", "old-1", "young-1"]

    story(work)


@pytest.mark.parametrize("is_told", [True, False])
def test_what_runs_on_after_its_job_was_deleted_keeps_the_folder(is_told: bool) -> None:
    async def work(world: Jobs) -> None:
        await world.add("first")
        await world.add("second")
        await world.look("first", "second")
        await world.plays("first-1", "runs")
        if is_told:
            world.now += timedelta(seconds=10)
            await world.look("first")
        world.api.remove(FINE_TUNE_JOBS, "first", "ns")  # as kubectl delete --cascade=orphan
        world.now += timedelta(seconds=30)  # only the words are others
        await world.look("first", "second")
        assert "whose attempt still runs after its deletion" in world.rejection("second")
        world.api.remove(CONFIG_MAPS, "first-1", "ns")
        await world.look("first")
        assert world.attempts == ["second-1"]

    story(work)


@pytest.mark.parametrize("is_done", [False, True], ids=["before the write", "after the write"])
def test_folder_is_refused_while_the_opening_of_another_job_has_no_response(is_done: bool) -> None:
    async def work(world: Jobs) -> None:
        await world.add("old")
        await world.add("new")
        await world.catch_up()
        hook = at_write(1, AWAY)
        world.api.before, world.api.after = (nothing, hook) if is_done else (hook, nothing)
        with pytest.raises(UnavailableError):
            await world.reconciler.reconcile(Key("ns", "old"))
        await world.reconciler.reconcile(Key("ns", "new"))  # before a watch shows the write
        assert world.attempts == []
        await world.look("old")
        assert world.attempts == ["old-1"]
        assert "ns/old" in world.rejection("new")

    story(work)


def test_waiting_job_is_woken_when_an_opening_was_not_written() -> None:
    async def work(world: Jobs) -> None:
        await world.add("old")
        await world.add("new")
        await world.catch_up()
        world.api.before = at_write(1, AWAY)
        with pytest.raises(UnavailableError):
            await world.reconciler.reconcile(Key("ns", "old"))
        await world.reconciler.reconcile(Key("ns", "new"))
        assert "ns/old" in world.rejection("new")
        await world.spec("old", suspend=True)
        await world.look("old")  # it wakes the other one
        assert world.attempts == ["new-1"]

    story(work)


def test_it_costs_no_call_to_know_who_has_a_folder() -> None:
    async def work(world: Jobs) -> None:
        for number in range(50):
            await world.add(f"job-{number}", "pvc://models/{name}")
        await world.add("copy", "pvc://models/job-20")
        await world.catch_up()
        for name in (*(f"job-{number}" for number in range(50)), "copy"):
            await world.reconciler.reconcile(Key("ns", name))
        await world.look()
        assert len(world.attempts) == 50
        assert "ns/job-20" in world.rejection("copy")
        calls: list[str] = []

        def count(verb: str, resource: Resource, name: str) -> None:
            calls.append(verb)

        await world.catch_up()
        world.api.before = count
        await world.reconciler.reconcile(Key("ns", "copy"))
        assert not calls

    story(work)


@pytest.mark.parametrize("seed", range(12))
def test_no_two_jobs_ever_write_one_folder_in_whatever_order_they_are_looked_at(seed: int) -> None:
    chance = random.Random(seed)
    names = ("a", "b", "c")

    def writers(world: Jobs) -> list[str]:
        alive = [one for one in world.api.objects(CONFIG_MAPS) if "gone" not in one["data"]]
        return sorted(one["metadata"]["name"].partition("-")[0] for one in alive)

    async def work(world: Jobs) -> None:
        for _ in range(25):
            name = chance.choice(names)
            there = {one["metadata"]["name"] for one in world.api.objects(FINE_TUNE_JOBS)}
            what = chance.choice(("add", "delete", "suspend", "resume", "end", "restart", "look"))
            if what == "add" and name not in there:
                await world.add(name, chance.choice((OUT, INSIDE)))
            elif what == "delete" and name in there:
                await world.api.delete(FINE_TUNE_JOBS, name, "ns")
            elif what in ("suspend", "resume") and name in there:
                await world.spec(name, suspend=what == "suspend")
            elif what == "end":
                for one in world.api.objects(CONFIG_MAPS):
                    end = chance.choice(("completes", "is gone", "finds bad data"))
                    await world.plays(one["metadata"]["name"], end)
            elif what == "restart":
                world.start_process()
            await world.look(*chance.sample(names, chance.randint(1, 3)))
            assert len(writers(world)) <= 1, writers(world)
            world.now += timedelta(seconds=chance.choice((1, 15)))

    story(work)

"""Lives of a job on the remote twin, lived again with a death or a fault at every write."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.resources import EVENTS, FINE_TUNE_JOBS
from finetune_operator.testing.service_suite import Fate
from remote_backend.backend import POLL_SECONDS
from remote_backend.service import RunState
from support.kernel.kernel_world import Crash
from support.kernel.virtual_time import run
from support.plugin.remote_lives import live
from support.plugin.twin_world import NAMESPACE, TwinWorld

CHAPTER_SECONDS = 100.0
"""Longer than any wait of the operator."""

DELETION_SECONDS = 500.0
"""... and than an unanswered submit may take, or a cancel that is not confirmed."""

Chapter = Callable[[TwinWorld], Coroutine[Any, Any, None]]


async def _begin(world: TwinWorld) -> None:
    await world.apply(restartPolicy__backoff={"baseSeconds": 0, "maxSeconds": 1})


async def _it_runs(world: TwinWorld) -> None:
    world.service.start(_newest(world))


async def _it_is_requeued(world: TwinWorld) -> None:
    world.service.requeue(_newest(world))


async def _it_is_moved(world: TwinWorld) -> None:
    world.service.move(_newest(world))


async def _the_service_fails(world: TwinWorld) -> None:
    world.service.end(_newest(world), RunState.FAILED, "ServiceError")


async def _suspend(world: TwinWorld) -> None:
    await world.change(suspend=True)


async def _resume(world: TwinWorld) -> None:
    await world.change(suspend=False)


async def _it_completes(world: TwinWorld) -> None:
    world.service.end(_newest(world), RunState.COMPLETED)


async def _cancels_are_never_confirmed(world: TwinWorld) -> None:
    world.service.stop_seconds = lambda run: None


async def _delete(world: TwinWorld) -> None:
    await world.delete()


STORIES: dict[str, tuple[Chapter, ...]] = {
    "restarted": (
        _begin,
        _it_runs,
        _it_is_requeued,
        _it_runs,
        _it_is_moved,
        _the_service_fails,
        _it_runs,
        _suspend,
        _resume,
        _it_runs,
        _it_completes,
        _delete,
    ),
    "deleted": (_begin, _it_runs, _delete),
    "suspended in the queue": (_begin, _suspend, _delete),
    "never confirmed": (_begin, _it_runs, _cancels_are_never_confirmed, _delete),
}


def _newest(world: TwinWorld) -> str:
    return list(world.service.runs)[-1]


@dataclass
class Telling:
    """What a telling of a story came to.

    Attributes:
        seen: Status and runs after each chapter.
        writes: What the operator wrote, in order.
        requests: What it asked of the service besides lists, in order.
        most_alive: Most runs of the job that lived at one time.
    """

    seen: list[dict[str, Any]] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    most_alive: int = 0


@dataclass
class Fault:
    """What goes wrong at one write.

    Attributes:
        number: Of the write, from 1.
        error: What the operator sees.
        is_done: Whether the write happens nevertheless.
    """

    number: int
    error: BaseException
    is_done: bool


async def tell(
    story: Sequence[Chapter], fault: Fault | None = None, fate: tuple[int, Fate] | None = None
) -> Telling:
    """Play the whole story, and let one write fail, or one request to the service."""
    telling = Telling()

    def fate_of(verb: str, name: str) -> Fate:
        if verb == "list":
            return Fate.ANSWERED
        telling.requests.append(verb)
        number, disturbed = fate or (0, Fate.ANSWERED)
        return disturbed if len(telling.requests) == number else Fate.ANSWERED

    def count(verb: str, what: str) -> None:
        telling.writes.append(f"{verb} {what}")
        if fault and not fault.is_done and len(telling.writes) == fault.number:
            raise fault.error

    def fail(verb: str, what: str) -> None:
        if fault and fault.is_done and len(telling.writes) == fault.number:
            raise fault.error

    async with TwinWorld.start() as world:
        world.service.latency, world.service.fate = lambda: 0.05, fate_of
        world.on_writes(before=count, after=fail)
        for chapter in story:
            await chapter(world)
            await asyncio.sleep(DELETION_SECONDS if chapter is _delete else CHAPTER_SECONDS)
            telling.seen.append(await told(world))
        telling.most_alive = world.service.most_alive
    return telling


async def told(world: TwinWorld) -> dict[str, Any]:
    """Return what must be the same in every telling: times, names and versions differ."""
    runs = [run.state for run in world.service.runs.values()]
    job = await world.job()
    if job is None:
        events = {one["reason"] for one in world.api.objects(EVENTS)}
        return {"job": None, "runs": runs, "confirmed": "CancelUnconfirmed" not in events}
    status = job["status"]
    return {
        "phase": status["phase"],
        "restarts": status.get("restarts"),
        "attempts": [
            (one["number"], one.get("failureClass"), one.get("disruptions"), bool(one.get("url")))
            for one in status["attempts"]
        ],
        "message": status["conditions"][0]["message"],
        "conditions": {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]},
        "runs": runs,
    }


AWAY = UnavailableError(0, "Timeout", "no answer in time")


@cache
def undisturbed(name: str) -> Telling:
    return run(tell(STORIES[name]))


def test_the_undisturbed_story_ends_well() -> None:
    telling = undisturbed("restarted")
    *_, complete, deleted = telling.seen
    assert complete["phase"] == "Succeeded"
    assert complete["runs"] == [RunState.FAILED, RunState.CANCELED, RunState.COMPLETED]
    assert deleted == {"job": None, "runs": complete["runs"], "confirmed": True}
    assert telling.most_alive == 1


def test_an_event_tells_of_a_run_whose_end_was_never_confirmed() -> None:
    deleted = undisturbed("never confirmed").seen[-1]
    assert deleted == {"job": None, "runs": [RunState.CANCELLING], "confirmed": False}


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize(
    ("error", "is_done"),
    [
        pytest.param(Crash(), False, id="crash before the write"),
        pytest.param(Crash(), True, id="crash after the write"),
        pytest.param(AWAY, True, id="done, and no answer", marks=pytest.mark.full),
    ],
)
def test_a_fault_at_any_write_changes_nothing_in_the_end(
    name: str, error: BaseException, is_done: bool
) -> None:
    model = undisturbed(name)
    for number, write in enumerate(model.writes, 1):
        if write.startswith("create events"):
            continue  # what a status tells is not told again
        telling = run(tell(STORIES[name], Fault(number, error, is_done)))
        assert telling.most_alive == 1, write
        for chapter, seen, expected in zip(STORIES[name], telling.seen, model.seen, strict=True):
            assert seen == expected, f"{write} (write {number}), after {chapter.__name__}"


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("fate", [Fate.THROTTLED, Fate.IGNORED, Fate.LOST, Fate.LATE])
def test_a_request_that_is_not_answered_changes_nothing_in_the_end(name: str, fate: Fate) -> None:
    model = undisturbed(name)
    for number, verb in enumerate(model.requests, 1):
        telling = run(tell(STORIES[name], fate=(number, fate)))
        assert telling.most_alive == 1, verb
        for chapter, seen, expected in zip(STORIES[name], telling.seen, model.seen, strict=True):
            assert seen == expected, f"{verb} (request {number}), after {chapter.__name__}"


def test_a_job_that_a_deletion_takes_away_though_it_has_our_finalizer_leaves_no_run() -> None:
    """An API server that has read a job for a deletion does not see what is added after that."""

    async def work() -> None:
        async with TwinWorld.start() as world:

            def take_away(verb: str, what: str) -> None:
                if verb == "patch" and what == "finetunejobs tiny":
                    world.on_writes()
                    loop.call_later(0.02, world.api.remove, FINE_TUNE_JOBS, "tiny", NAMESPACE)

            loop = asyncio.get_running_loop()
            world.on_writes(after=take_away)
            await world.apply()
            await asyncio.sleep(CHAPTER_SECONDS)
            assert await world.job() is None
            assert not [verb for verb, _ in world.service.requests if verb != "list"]

    run(work())


def test_a_resync_asks_the_service_for_nothing_and_so_does_an_operator_that_has_ended() -> None:
    async def work() -> None:
        async with TwinWorld.start(resync_seconds=30.0) as world:
            for number in range(20):
                await world.apply(f"job-{number}")
            await asyncio.sleep(10.0)
            for name in list(world.service.runs):
                world.service.start(name)
            await asyncio.sleep(60.0)
            assert {job["status"]["phase"] for job in (await world.jobs()).values()} == {"Running"}
            world.service.requests.clear()
            await asyncio.sleep(100 * POLL_SECONDS)
            assert {verb for verb, _ in world.service.requests} == {"list"}
            assert len(world.service.requests) <= 100
        asked = len(world.service.requests)
        await asyncio.sleep(100 * POLL_SECONDS)
        assert len(world.service.requests) == asked

    run(work())


def test_lives_of_many_jobs_are_whole_though_the_operator_dies_again_and_again() -> None:
    """`make remote-lives` lives more of them."""
    outcome = live(seed=0, jobs=60, deaths=30)
    assert not outcome.faults, outcome.told

"""Nothing that happens is missed: without a resync, each change is acted upon by itself.

Answers and watches overtake each other here, and what happens waits for nothing that came before.
Nobody makes the operator look; see `live_world`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.validation import defaulted
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Resource
from finetune_operator.reconcile.decide import RECHECK_SECONDS
from support.api.builders import manifest
from support.kernel.fake_api import FakeApi
from support.kernel.fake_backend import FakeBackend
from support.kernel.kernel_world import HAPPENINGS, START, Crash, happen
from support.kernel.live_world import AWAY, SETTINGS, LiveWorld
from support.kernel.virtual_time import run

REST_SECONDS = 12.0


@dataclass(frozen=True)
class Scene:
    """One thing that happens, what fails meanwhile, and how long it is quiet afterwards."""

    what: str
    pause: float
    fault: tuple[int, bool, BaseException] | None


SCENES = st.builds(
    Scene,
    what=st.sampled_from(HAPPENINGS),
    pause=st.sampled_from([0.0, 0.01, 0.04, 0.1, 0.3, REST_SECONDS]),
    fault=st.none() | st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from([Crash(), AWAY])),
)


async def play(world: LiveWorld, scene: Scene) -> None:
    if scene.fault is not None:
        number, is_done, error = scene.fault
        world.fail_at(number, error, is_done=is_done)
    if scene.what == "restart":
        world.restart()
    elif scene.what == "wait":
        await world.rest(100)
    else:
        await happen(world, scene.what)
    await asyncio.sleep(scene.pause)
    if scene.pause == REST_SECONDS:
        await world.rest(0)


@settings(max_examples=70, deadline=None, derandomize=True)
@given(story=st.lists(SCENES, min_size=1, max_size=8), seed=st.integers(0, 999))
def test_whatever_happens_is_acted_upon_without_a_resync(story: list[Scene], seed: int) -> None:
    async def work() -> None:
        async with LiveWorld.start(seed) as world:
            await world.apply()
            for scene in story:
                await play(world, scene)
                assert world.most_alive <= 1
            await world.rest(REST_SECONDS)
            assert world.most_alive <= 1

    run(work())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    before=st.lists(SCENES, max_size=3),
    meanwhile=st.lists(st.sampled_from([*HAPPENINGS, "delete"]), max_size=3),
    seconds=st.sampled_from([0.3, 5.0, 40.0]),
    forgets=st.booleans(),
    seed=st.integers(0, 999),
)
def test_fifteen_seconds_after_an_outage_all_is_as_if_there_had_been_none(
    before: list[Scene], meanwhile: list[str], seconds: float, forgets: bool, seed: int
) -> None:
    async def work() -> None:
        async with LiveWorld.start(seed) as world:
            await world.apply()
            for scene in before:
                await play(world, scene)
            async with world.outage(forgets=forgets):
                for what in meanwhile:
                    await asyncio.sleep(seconds / len(meanwhile))
                    if what == "delete":
                        await world.delete_and_apply()
                    elif what == "restart":
                        world.restart()
                    elif what != "wait":
                        await happen(world, what)
                await asyncio.sleep(seconds)
            await world.rest(15)
            assert world.most_alive <= 1

    run(work())


class Late(FakeBackend):
    """A backend that lacks something for its jobs until it comes.

    Attributes:
        has_come: Whether it is there.
    """

    name: ClassVar[str] = "late"

    def __init__(self) -> None:
        super().__init__()
        self.has_come = False

    def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        return () if self.has_come else [Problem("spec.backend", "lacks a profile")]


def test_what_comes_while_a_new_job_is_refused_has_it_looked_at_again() -> None:
    api, backend = FakeApi(), Late()

    async def work() -> None:
        settings = SETTINGS.model_copy(update={"backends": ()})
        loop = asyncio.get_running_loop()
        term = LeaderTerm(
            api,
            settings,
            backends={"late": backend},
            listen=FollowedJobs,
            now=lambda: START + timedelta(seconds=loop.time()),
        )

        def come(verb: str, resource: Resource, name: str) -> None:
            if (verb, resource, backend.has_come) == ("patch", FINE_TUNE_JOBS, False):
                backend.has_come = True
                term.wake(None)  # as the watch of that kind does

        api.before = come
        task = asyncio.create_task(term.run())
        await asyncio.sleep(REST_SECONDS)  # until it no longer lists
        fields = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
        made = manifest(name="new", backend={"type": "late"}, **fields)
        await api.create(FINE_TUNE_JOBS, defaulted(made), "ns")

        await asyncio.sleep(RECHECK_SECONDS / 3)

        told = (await api.get(FINE_TUNE_JOBS, "new", "ns"))["status"]["conditions"]
        assert {one["type"]: one["status"] for one in told}["Accepted"] == "True"
        task.cancel()
        await asyncio.wait({task})

    run(work())

"""Many jobs at once: each attempt is recorded and then created, with one patch a job."""

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from itertools import pairwise

from finetune_operator.api.validation import defaulted
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, Resource
from support.api.builders import manifest
from support.kernel.fake_api import FakeApi
from support.kernel.kernel_world import START
from support.kernel.live_world import SETTINGS
from support.kernel.virtual_time import run

NUM_JOBS = 40
NUM_LATE = 10
LATE_SECONDS = 8.0  # so late that the first jobs are observed before these are opened
OPENING_SECONDS = 0.3
TELLING_SECONDS = 0.01
QUIET_SECONDS = 10.0
STEP_SECONDS = 0.05


class Burst:
    """A server that takes its time, a term with few workers, and what the term wrote."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, Resource, str]] = []
        self.api = FakeApi()
        self.api.now = _time
        self.api.after = self._note
        self.api.answer_lag = self._lag
        settings = SETTINGS.model_copy(update={"workers": 1})
        self.term = LeaderTerm(self.api, settings, listen=FollowedJobs, now=_time)
        self._lag_seconds = 0.0

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.term.run())

    async def apply(self, numbers: Iterable[int] = range(NUM_JOBS)) -> None:
        for number in numbers:
            made = manifest(
                name=f"job-{number:02}",
                backend={"type": "configmap"},
                model__source="hf://a/b",
                dataset__source="hf://a/c",
            )
            await self.api.create(FINE_TUNE_JOBS, defaulted(made), "ns")

    def places(self, verb: str, resource: Resource) -> list[int]:
        """Return which of the writes, counted from 0, are such."""
        wanted = (verb, resource)
        return [place for place, one in enumerate(self.writes) if one[:2] == wanted]

    def _note(self, verb: str, resource: Resource, name: str) -> None:
        self.writes.append((verb, resource, name))
        is_applied = (verb, resource) == ("create", FINE_TUNE_JOBS)
        seconds = OPENING_SECONDS if resource == CONFIG_MAPS else TELLING_SECONDS
        self._lag_seconds = 0.0 if is_applied else seconds

    def _lag(self) -> float:
        return self._lag_seconds


async def passes(is_true: Callable[[], bool], seconds: float) -> float:
    """Wait until something is true; return when that was, on the loop's clock."""
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(STEP_SECONDS)
    return asyncio.get_running_loop().time()


def _time() -> datetime:
    return START + timedelta(seconds=asyncio.get_running_loop().time())


def test_each_job_of_a_burst_costs_one_patch_and_one_child_until_it_runs() -> None:
    async def work() -> None:
        burst = Burst()
        task = burst.start()
        await passes(lambda: burst.term.health().is_ready, 5)
        await burst.apply()
        await asyncio.sleep(LATE_SECONDS)
        num_jobs = NUM_JOBS + NUM_LATE
        await burst.apply(range(NUM_JOBS, num_jobs))
        await passes(lambda: len(burst.places("create", CONFIG_MAPS)) == num_jobs, 60)
        await asyncio.sleep(QUIET_SECONDS)
        created, patched = (
            burst.places("create", CONFIG_MAPS),
            burst.places("patch", FINE_TUNE_JOBS),
        )
        assert len(created) == len(patched) == num_jobs
        opened = [burst.writes[place][2] for place in patched]
        assert opened == [burst.writes[place][2].removesuffix("-1") for place in created]
        assert all(patch < child for patch, child in zip(patched, created, strict=True))
        task.cancel()

    run(work())


def test_the_backlog_is_what_was_there_at_the_start_and_falls_to_nothing() -> None:
    async def work() -> None:
        burst = Burst()
        await burst.apply()
        task = burst.start()
        await passes(lambda: burst.term.health().is_ready, 5)
        seen = [burst.term.health().backlog]
        while seen[-1]:
            assert asyncio.get_running_loop().time() < 30
            await asyncio.sleep(STEP_SECONDS)
            seen.append(burst.term.health().backlog)
        assert seen[0] == NUM_JOBS
        assert set(seen) == set(range(NUM_JOBS + 1))
        assert all(before >= after for before, after in pairwise(seen))
        assert len(burst.places("create", CONFIG_MAPS)) == NUM_JOBS
        task.cancel()

    run(work())

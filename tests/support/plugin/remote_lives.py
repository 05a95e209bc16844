"""Random lives of many jobs on the remote twin, while the operator dies again and again.

`remote_lives.py SEED --jobs 500 --deaths 200` tells what went wrong. Users apply,
suspend, resume and delete; the service throttles a fifth of all requests, loses answers, carries
some out late, moves and requeues runs, and never confirms some cancels. Time is virtual; fewer live
in real time in `integration/test_remote_kills.py`, where the operator is a process.
"""

import argparse
import asyncio
import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from finetune_operator.testing.service_suite import Fate
from remote_backend.service import RemoteRun, RunState
from support.kernel.kernel_world import Crash
from support.kernel.virtual_time import run
from support.plugin.remote_world import RemoteWorld
from support.plugin.twin_world import TwinWorld, nothing

LIFE_SECONDS = 3600.0
"""For so long things happen; then nothing is disturbed any more."""

QUIET_SECONDS = 3600.0
"""By then every life has come to its end."""

LATE_SECONDS = 100.0
"""So much later may a request be carried out that nobody has answered."""

_FATES = {
    Fate.THROTTLED: 0.2,
    Fate.LOST: 0.05,
    Fate.LATE: 0.05,
    Fate.IGNORED: 0.05,
    Fate.ANSWERED: 0.65,
}
_ACT_SECONDS = (0.0, 0.5, 10.0, 100.0, 300.0)
_STOP_SECONDS: tuple[float | None, ...] = (0.5, 5.0, 60.0, 200.0, None)
_ENDS = (
    (RunState.COMPLETED, ""),
    (RunState.COMPLETED, ""),
    (RunState.FAILED, "ServiceError"),
    (RunState.FAILED, "Preempted"),
    (RunState.FAILED, "UserError"),
    (RunState.CANCELED, ""),
)

Happening = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Outcome:
    """What became of all jobs.

    Attributes:
        faults: What must not be, one sentence each.
        told: What happened, to be seen by people.
    """

    faults: list[str]
    told: str


class Lives:
    """Many jobs, and their users.

    Args:
        world: Where they live.
        seed: Of all that is left to chance.
        jobs: How many there are.
        changed: The share of jobs that users suspend and resume, and of those that they delete.
        pace: How long a second of their lives takes; what the operator waits for is not theirs.
    """

    def __init__(
        self, world: RemoteWorld, seed: int, jobs: int, *, changed: float = 0.3, pace: float = 1.0
    ) -> None:
        self._world = world
        self._seed = seed
        self._chance = random.Random(seed)
        self._changed = changed
        self._pace = pace
        self._names = [f"job-{number}" for number in range(jobs)]
        self._deleted: set[str] = set()
        self._lives: set[asyncio.Task[None]] = set()

    async def run(self, dying: Coroutine[Any, Any, None]) -> Outcome:
        """Live all of them to their ends, and judge.

        Args:
            dying: Meanwhile it lets the operator die again and again.
        """
        self._disturb()
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            group.create_task(dying)
            for at, happen in sorted(self._plan(), key=lambda one: one[0]):
                await asyncio.sleep(began + at * self._pace - loop.time())
                await happen()
        self._world.service.fate = lambda verb, name: Fate.ANSWERED
        await self._sleep(LATE_SECONDS)
        return await self._settled()

    def _disturb(self) -> None:
        """Let the service be as bad as it may be."""
        service, chance, pace = self._world.service, self._chance, self._pace
        fates, weights = list(_FATES), list(_FATES.values())
        stops = [one and one * pace for one in _STOP_SECONDS]
        service.on_created = self._begin
        service.fate = lambda verb, name: chance.choices(fates, weights)[0]
        service.latency = lambda: chance.uniform(0.02, 0.5) * pace
        service.late_seconds = lambda: chance.uniform(1, LATE_SECONDS) * pace
        service.stop_seconds = lambda run: chance.choice(stops)
        service.retry_after = 5.0 * pace

    def _plan(self) -> list[tuple[float, Happening]]:
        """Return what users do."""
        plan: list[tuple[float, Happening]] = []
        world, chance = self._world, self._chance
        for name in self._names:
            at = chance.uniform(0, LIFE_SECONDS / 2)
            plan.append((at, partial(world.apply, name)))
            if chance.random() < self._changed:
                at += chance.choice(_ACT_SECONDS)
                plan.append((at, partial(self._change, name, suspend=True)))
                at += chance.choice(_ACT_SECONDS)
                plan.append((at, partial(self._change, name, suspend=False)))
            if chance.random() < self._changed:
                at += chance.choice(_ACT_SECONDS)
                plan.append((at, partial(self._delete, name)))
        return plan

    async def _change(self, name: str, **spec: Any) -> None:
        if await self._world.job(name) is not None:
            await self._world.change(name, **spec)

    async def _delete(self, name: str) -> None:
        self._deleted.add(name)
        if await self._world.job(name) is not None:
            await self._world.delete(name)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._pace)

    def _begin(self, name: str) -> None:
        life = asyncio.create_task(self._live(name))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    async def _live(self, name: str) -> None:
        """Live as a run: wait for machines, train, be moved and requeued, and end.

        A run whose job is gone trains for ever: nobody else would end it, either.
        """
        service, chance = self._world.service, random.Random(f"{self._seed} {name}")
        await self._sleep(chance.uniform(0, 60))
        service.start(name)
        while chance.random() < 0.4:
            await self._sleep(chance.uniform(5, 120))
            if chance.random() < 0.5:
                service.move(name)
                continue
            service.requeue(name)
            await self._sleep(chance.uniform(0, 60))
            service.start(name)
        await self._sleep(chance.uniform(0, 300))
        is_gone = await self._world.job(service.runs[name].tags["job"]) is None
        if service.runs[name].state is RunState.RUNNING and not is_gone:
            service.end(name, *chance.choice(_ENDS))

    async def _settled(self) -> Outcome:
        """Return how it is once all is well, or after QUIET_SECONDS."""
        loop = asyncio.get_running_loop()
        end = loop.time() + QUIET_SECONDS * self._pace
        while (outcome := await self._judge()).faults:
            if loop.time() >= end:
                return await self._judge(may_wait=True)
            await asyncio.sleep(1.0)
        return outcome

    async def _judge(self, *, may_wait: bool = False) -> Outcome:
        """Return how it is.

        Args:
            may_wait: Whether a job between attempts is whole until its next attempt is due. The
                operator's waits after attempts without progress do not follow `pace`.
        """
        world, service, jobs = self._world, self._world.service, await self._world.jobs()
        faults = []
        if service.most_alive > 1:
            faults.append(f"{service.most_alive} runs of one job lived at one time")
        told = await world.told()
        for one in service.alive:
            job = jobs.get(one.tags["job"])
            if job is None and not any(one.name in message for message in told):
                faults.append(f"run {one.name} is left, and its job is gone")
            elif job is not None and not _awaits_its_end(job["status"], one):
                faults.append(f"run {one.name} is left, and its job is {job['status']['phase']}")
        alive = {one.tags["job"] for one in service.alive}
        last = {one.tags["job"]: one for one in service.runs.values()}
        for name, job in jobs.items():
            phase = job["status"]["phase"]
            if "deletionTimestamp" in job["metadata"]:
                faults.append(f"{name} is deleted and stays: {_said(job['status'])}")
            elif phase not in ("Succeeded", "Failed"):
                waits = may_wait and _starts_later(job["status"], service.now())
                if name not in alive and not waits:
                    faults.append(f"{name} is lost: {phase}: {_said(job['status'])}")
            elif (phase == "Succeeded") != (last[name].state is RunState.COMPLETED):
                faults.append(f"{name} is {phase}, and its last run {last[name].state}")
        lost = set(self._names) - self._deleted - set(jobs)
        faults += [f"{name} is gone, and nobody has deleted it" for name in sorted(lost)]
        requests = Counter(verb for verb, _ in service.requests)
        phases = Counter(job["status"]["phase"] for job in jobs.values())
        said = (
            f"seed {self._seed}: {world.deaths} deaths, {len(service.runs)} runs, "
            f"{len(service.alive)} of them alive, requests {dict(requests)}, "
            f"jobs {dict(phases)}"
        )
        return Outcome(faults, said)


def _awaits_its_end(status: Any, run: RemoteRun) -> bool:
    """Say whether the job waits for the run's end, which the service does not confirm."""
    is_newest = run.tags["attempt"] == str(status["attempt"])
    return is_newest and run.state is RunState.CANCELLING and status["phase"] == "Suspending"


def _starts_later(status: Any, now: datetime) -> bool:
    """Whether the job's next attempt starts after `now`."""
    found = re.search(r"starts at (\S+),", _said(status))
    return found is not None and datetime.fromisoformat(found[1]) > now


def _said(status: Any) -> str:
    found: str = status["conditions"][0]["message"]
    return found


async def _die(world: TwinWorld, chance: random.Random, deaths: int) -> None:
    """Let the operator die at moments, and at some of its writes."""
    loop = asyncio.get_running_loop()
    for at in sorted(chance.uniform(0, LIFE_SECONDS) for _ in range(deaths)):
        await asyncio.sleep(at - loop.time())
        if chance.random() < 0.5:
            await world.kill()
        else:
            _die_at_a_write(world, chance)
    world.on_writes()
    while world.deaths < deaths:  # those that met no write
        await asyncio.sleep(chance.uniform(0, 10))
        await world.kill()


def _die_at_a_write(world: TwinWorld, chance: random.Random) -> None:
    """Let the operator die at one of its next writes, before or after it was done."""
    left = chance.randint(1, 10)

    def die(verb: str, what: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            world.on_writes()
            raise Crash

    before, after = chance.choice(((die, nothing), (nothing, die)))
    world.on_writes(before=before, after=after)


def live(seed: int, jobs: int, deaths: int) -> Outcome:
    """Return what became of so many jobs while the operator died so often."""

    async def work() -> Outcome:
        chance = random.Random(f"{seed} deaths")
        async with TwinWorld.start() as world:
            world.api.make_uid = lambda: str(UUID(int=chance.getrandbits(128)))
            return await Lives(world, seed, jobs).run(_die(world, chance, deaths))

    random.seed(seed)
    return run(work())


def main() -> int:
    """Live as the command line says, and return how to exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--deaths", type=int, default=200)
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    outcome = live(given.seed, given.jobs, given.deaths)
    print(outcome.told)
    for fault in outcome.faults:
        print(fault)
    return bool(outcome.faults)


if __name__ == "__main__":
    sys.exit(main())

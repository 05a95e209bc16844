"""Random lives of many jobs on the remote twin, while the operator dies again and again.

`python tests/remote_lives.py SEED --jobs 500 --deaths 200` tells what went wrong. Users apply,
suspend, resume and delete; the service throttles a fifth of all requests, loses answers, carries
some out late, moves and requeues runs, and never confirms some cancels. Time is virtual.
"""

import argparse
import asyncio
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from finetune_operator.kube.resources import EVENTS
from finetune_operator.testing.remote_service import Fate, RemoteRun, RunState
from kernel_world import Crash
from twin_world import TwinWorld, nothing
from virtual_time import run

LIFE_SECONDS = 3600.0
"""For so long things happen; then nothing is disturbed any more."""

QUIET_SECONDS = 3600.0
"""By then every life has come to its end."""

_FATES = {
    Fate.THROTTLED: 0.2,
    Fate.LOST: 0.05,
    Fate.LATE: 0.05,
    Fate.IGNORED: 0.05,
    Fate.ANSWERED: 0.65,
}
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
    """Many jobs, their users, and whoever kills the operator.

    Args:
        world: Where they live.
        seed: Of all that is left to chance.
        jobs: How many there are.
        deaths: How often the operator dies.
    """

    def __init__(self, world: TwinWorld, seed: int, jobs: int, deaths: int) -> None:
        self._world = world
        self._seed = seed
        self._chance = random.Random(seed)
        self._names = [f"job-{number}" for number in range(jobs)]
        self._deaths = deaths
        self._lives: set[asyncio.Task[None]] = set()
        world.api.make_uid = lambda: str(UUID(int=self._chance.getrandbits(128)))

    async def run(self) -> Outcome:
        """Live all of them to their ends, and judge."""
        service = self._world.service
        service.on_created = self._begin
        fates, weights = list(_FATES), list(_FATES.values())
        service.fate = lambda verb, name: self._chance.choices(fates, weights)[0]
        service.latency = lambda: self._chance.uniform(0.02, 0.5)
        service.late_seconds = lambda: self._chance.uniform(1, 100)
        service.stop_seconds = lambda run: self._chance.choice(_STOP_SECONDS)
        loop = asyncio.get_running_loop()
        for at, happen in sorted(self._plan(), key=lambda one: one[0]):
            await asyncio.sleep(max(0.0, at - loop.time()))
            await happen()
        self._world.on_writes()
        while self._world.deaths < self._deaths:  # those that met no write
            await asyncio.sleep(self._chance.uniform(0, 10))
            await self._world.kill()
        service.fate = lambda verb, name: Fate.ANSWERED
        await asyncio.sleep(QUIET_SECONDS)
        return self._judge()

    def _plan(self) -> list[tuple[float, Happening]]:
        """Return what users do and when the operator dies."""
        plan: list[tuple[float, Happening]] = []
        world, chance = self._world, self._chance
        for name in self._names:
            at = chance.uniform(0, LIFE_SECONDS / 2)
            plan.append((at, partial(world.apply, name)))
            if chance.random() < 0.3:
                at += chance.choice((0.0, 0.5, 10.0, 300.0))
                plan.append((at, partial(self._change, name, suspend=True)))
                at += chance.choice((0.0, 0.5, 10.0, 300.0))
                plan.append((at, partial(self._change, name, suspend=False)))
            if chance.random() < 0.3:
                at += chance.choice((0.0, 0.5, 10.0, 300.0))
                plan.append((at, partial(self._delete, name)))
        for _ in range(self._deaths):
            at = chance.uniform(0, LIFE_SECONDS)
            plan.append((at, chance.choice((world.kill, self._die_at_a_write))))
        return plan

    async def _change(self, name: str, **spec: Any) -> None:
        if await self._world.job(name) is not None:
            await self._world.change(name, **spec)

    async def _delete(self, name: str) -> None:
        if await self._world.job(name) is not None:
            await self._world.delete(name)

    async def _die_at_a_write(self) -> None:
        """Let the operator die at one of its next writes, before or after it was done."""
        left = self._chance.randint(1, 10)

        def die(verb: str, what: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._world.on_writes()
                raise Crash

        before, after = self._chance.choice(((die, nothing), (nothing, die)))
        self._world.on_writes(before=before, after=after)

    def _begin(self, name: str) -> None:
        life = asyncio.create_task(self._live(name))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    async def _live(self, name: str) -> None:
        """Live as a run: wait for machines, train, be moved and requeued, and end."""
        service, chance = self._world.service, random.Random(f"{self._seed} {name}")
        await asyncio.sleep(chance.uniform(0, 60))
        service.start(name)
        while chance.random() < 0.4:
            await asyncio.sleep(chance.uniform(5, 120))
            if chance.random() < 0.5:
                service.move(name)
                continue
            service.requeue(name)
            await asyncio.sleep(chance.uniform(0, 60))
            service.start(name)
        await asyncio.sleep(chance.uniform(0, 300))
        if service.runs[name].state is RunState.RUNNING:
            service.end(name, *chance.choice(_ENDS))

    def _judge(self) -> Outcome:
        world, jobs = self._world, self._world.jobs()
        faults = []
        if world.service.most_alive > 1:
            faults.append(f"{world.service.most_alive} runs of one job lived at one time")
        told = [one["message"] for one in world.api.objects(EVENTS)]
        for one in world.service.alive:
            job = jobs.get(one.tags["job"])
            if job is None and not any(one.name in message for message in told):
                faults.append(f"run {one.name} is left, and its job is gone")
            elif job is not None and not _awaits_its_end(job["status"], one):
                faults.append(f"run {one.name} is left, and its job is {job['status']['phase']}")
        alive = {one.tags["job"] for one in world.service.alive}
        for name, job in jobs.items():
            phase = job["status"]["phase"]
            if "deletionTimestamp" in job["metadata"]:
                faults.append(f"{name} is deleted and stays: {_said(job['status'])}")
            elif phase not in ("Succeeded", "Failed") and name not in alive:
                faults.append(f"{name} is lost: {phase}: {_said(job['status'])}")
        requests = Counter(verb for verb, _ in world.service.requests)
        phases = Counter(job["status"]["phase"] for job in jobs.values())
        said = (
            f"seed {self._seed}: {world.deaths} deaths, {len(world.service.runs)} runs, "
            f"{len(world.service.alive)} of them alive, requests {dict(requests)}, "
            f"jobs {dict(phases)}"
        )
        return Outcome(faults, said)


def _awaits_its_end(status: Any, run: RemoteRun) -> bool:
    """Say whether the job waits for the run's end, which the service does not confirm."""
    is_newest = run.tags["attempt"] == str(status["attempt"])
    return is_newest and run.state is RunState.CANCELLING and status["phase"] == "Suspending"


def _said(status: Any) -> str:
    found: str = status["conditions"][0]["message"]
    return found


def live(seed: int, jobs: int, deaths: int) -> Outcome:
    """Return what became of so many jobs while the operator died so often."""

    async def work() -> Outcome:
        async with TwinWorld.start() as world:
            return await Lives(world, seed, jobs, deaths).run()

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

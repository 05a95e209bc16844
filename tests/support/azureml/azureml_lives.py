"""Random lives of jobs on a stand-in for Azure ML, while operators are killed or overtaken.

`azureml_lives.py SEED --jobs 100 --deaths 200` tells what went wrong. Users apply,
suspend, resume and delete; Azure ML throttles, fails, loses answers, carries requests out late,
takes nodes away, and does not confirm some cancels. The SDK is the real one.
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from azureml_service import SeenJob, ServiceClient, running_service
from finetune_operator.api.validation import defaulted
from finetune_operator.backends.azureml.workspace_client import REQUESTS_PER_SECOND
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import EVENTS, FINE_TUNE_JOBS, Object
from finetune_trainer.config import HEARD_TAG, FailureClass, Heard
from support.api.builders import manifest
from support.azureml.azureml_cases import profile
from support.azureml.azureml_hasty import BOUND_SECONDS
from support.cluster.clusters import embedded_cluster
from support.cluster.operators import Api, OperatorProcess, open_api

LATE_SECONDS = 3.0
"""So much later may a request be carried out that nobody has answered."""

SLOW_SECONDS = 1.0
"""So long may an answer take, in which the operator is killed or the job deleted."""

DEATH_SECONDS = 6.0
"""An operator that leads is killed after at most so long."""

BESIDE_SECONDS = 2.0
"""So long may an operator that was overtaken run beside the one that leads."""

QUIET_SECONDS = 60.0
"""By then every life has come to its end."""

_START_SECONDS = 3.0  # that an operator takes to lead, more or less
_WAIT_SECONDS, _TRAIN_SECONDS = 3.0, 20.0
_CHANGED = 0.6  # of the jobs users suspend and resume so many, and delete so many
_FAULTS: tuple[dict[str, Any], ...] = (
    {"status": 429, "retry_after": 0.3},
    {"status": 503},
    {"status": 503, "is_carried_out": True},
    {"is_lost": True},
    {"is_lost": True, "is_carried_out": True},
    {"is_late": True, "delay": LATE_SECONDS},
    {"delay": SLOW_SECONDS},
    {"delay": SLOW_SECONDS, "is_carried_out": True},
)
_WRITES = ("job.put", "job.put", "job.cancel", "mlflow.runs.set-tag")
_READS = ("job.get", "mlflow.runs.get", "run.details", "token")
_SERVICE_FAULT = "ServiceError: an internal error of the service"


class Lives:
    """Many jobs, their users, their service and an operator that dies.

    Args:
        api: The cluster.
        client: Of the same, for this loop.
        namespace: Of the jobs.
        service: Who runs them.
        seed: Of all that is left to chance.
        jobs: How many there are.
        deaths: How often the operator is killed meanwhile.

    Attributes:
        deaths: How often the operator has died.
    """

    def __init__(
        self,
        api: Api,
        client: HttpClient,
        namespace: str,
        service: ServiceClient,
        *,
        seed: int,
        jobs: int,
        deaths: int,
    ) -> None:
        self._api, self._client, self._namespace = api, client, namespace
        self._service, self._chance = service, random.Random(seed)
        self._names = [f"job-{number}" for number in range(jobs)]
        self._deleted: set[str] = set()
        self._cancelled_in_studio: set[str] = set()
        self._living: dict[str, asyncio.Task[None]] = {}
        self._is_quiet = False
        self._left = deaths
        self._seconds = deaths * (DEATH_SECONDS / 2 + _START_SECONDS)
        self.deaths = 0
        self._operator = self._start()

    @classmethod
    @asynccontextmanager
    async def begun(
        cls, api: Api, namespace: str, folder: Path, **chance: int
    ) -> AsyncIterator[Self]:
        """Have service and operator at work."""
        with running_service(folder) as service:
            async with await HttpClient.connect(api.kubeconfig) as client:
                lives = cls(api, client, namespace, service, **chance)
                try:
                    yield lives
                finally:
                    await asyncio.to_thread(lives._operator.end)
                    await lives._let_go()

    async def live(self) -> list[str]:
        """Live all lives to their ends, and return what must not be."""
        async with asyncio.TaskGroup() as group:
            disturbing = group.create_task(self._disturb())
            watching = group.create_task(self._begin_runs())
            users = [group.create_task(self._use(name)) for name in self._names]
            await self._die()
            await asyncio.wait(users)
            disturbing.cancel()
            await asyncio.wait([disturbing])
            self._is_quiet = True
            self._service.clear_faults()
            self._service.settings(cancel="sigterm")
            await asyncio.sleep(LATE_SECONDS)
            faults = await self._settled()
            watching.cancel()
            for life in self._living.values():
                life.cancel()
        return faults

    def told(self) -> str:
        """Return what has happened, to be seen by people."""
        states = Counter(one.state for one in self._service.jobs())
        asked = Counter(one.kind for one in self._service.requests())
        return f"{self.deaths} deaths, runs {dict(states)}, requests {dict(asked)}"

    async def _use(self, name: str) -> None:
        """Apply a job, and perhaps suspend, resume and delete it."""
        chance = random.Random(f"{name} {self._chance.random()}")
        await asyncio.sleep(chance.uniform(0, self._seconds / 2))
        await self._apply(name)
        if chance.random() < _CHANGED:
            await self._moment(name, chance)
            await self._change(name, suspend=True)
            await asyncio.sleep(chance.choice((0.0, 1.0, 10.0)))
            await self._change(name, suspend=False)
        if chance.random() < _CHANGED:
            await self._moment(name, chance)
            await self._delete(name)

    async def _moment(self, name: str, chance: random.Random) -> None:
        """Wait until a run of the job exists or trains, or not at all."""
        loop, states = asyncio.get_running_loop(), chance.choice((("NotStarted", "Queued"), ()))
        end = loop.time() + chance.choice((1.0, self._seconds / 4, self._seconds / 4))
        while loop.time() < end:
            await asyncio.sleep(0.1)
            there = [one.state for one in self._service.jobs() if _is_of(name, one)]
            if any(state in (*states, "Running") for state in there):
                return

    async def _apply(self, name: str) -> None:
        fields: dict[str, Any] = {
            "model__source": "hf://a/b",
            "dataset__source": "hf://a/c",
            "backend": {"type": "hasty"},
            "metadata__namespace": self._namespace,
            "restartPolicy__backoff": {"baseSeconds": 0, "maxSeconds": 1},
            "deadlines__terminationGraceSeconds": 1,
        }
        made = defaulted(manifest(name=name, **fields))
        await self._client.create(FINE_TUNE_JOBS, made, self._namespace)

    async def _change(self, name: str, **spec: Any) -> None:
        with suppress(NotFoundError):  # it was deleted meanwhile
            await self._client.patch(FINE_TUNE_JOBS, name, self._namespace, {"spec": spec})

    async def _delete(self, name: str) -> None:
        self._deleted.add(name)
        with suppress(NotFoundError):
            await self._client.delete(FINE_TUNE_JOBS, name, self._namespace)

    async def _die(self) -> None:
        """Kill one operator after the other, some before they lead, many while they write."""
        for _ in range(self._left):
            if self._chance.random() < 0.9:
                await asyncio.to_thread(self._operator.wait_for, "synced", 60.0)
            written = await self._deadly_moment()
            if self._chance.random() < 0.2:
                await self._overtake()
            else:
                await asyncio.to_thread(self._operator.kill)
                self.deaths += 1
                if written is not None and self._chance.random() < 0.5:  # before anybody looks
                    await self._delete(written)
                self._operator = self._start()

    async def _overtake(self) -> None:
        """Pause the operator until another leads, let both run for a moment, and kill the first."""
        paused = self._operator
        paused.send(signal.SIGSTOP)
        try:
            self.deaths += 1
            self._operator = self._start()
            await asyncio.to_thread(self._operator.wait_for, "synced", 60.0)
            paused.send(signal.SIGCONT)
            await asyncio.sleep(self._chance.uniform(0, BESIDE_SECONDS))
        finally:
            await asyncio.to_thread(paused.kill)

    async def _deadly_moment(self) -> str | None:
        """Wait for some seconds, or until something is written, or until a run is created.

        The operator never hears of that run: its answer is late.

        Returns:
            The job that was written for.
        """
        kinds = self._chance.choice(((), _WRITES, ("job.put",), ("job.put",)))
        if not kinds:
            await asyncio.sleep(self._chance.uniform(0, DEATH_SECONDS))
            return None
        if kinds is not _WRITES:
            self._service.fault("job.put", times=1, delay=SLOW_SECONDS, is_carried_out=True)
        loop, before = asyncio.get_running_loop(), len(self._asked(kinds))
        end = loop.time() + DEATH_SECONDS
        while loop.time() < end and len(self._asked(kinds)) == before:
            await asyncio.sleep(0.02)
        written = self._asked(kinds)[before:]
        return next((name for name in self._names if f"{name}-" in "".join(written[:1])), None)

    def _asked(self, kinds: Sequence[str]) -> list[str]:
        """Return the run of each request of these kinds so far."""
        return [one.name for one in self._service.requests() if one.kind in kinds]

    def _start(self) -> OperatorProcess:
        return OperatorProcess(
            self._api.kubeconfig,
            self._namespace,
            f"replica-{self.deaths}",
            backends="hasty=support.azureml.azureml_hasty:HastyBackend",
            environ={**self._service.environ(), REQUESTS_PER_SECOND: "100"},
            max_retry_seconds=1,
            lease_seconds=2,
            renew_deadline_seconds=1.5,
            renew_seconds=0.3,
        )

    async def _disturb(self) -> None:
        """Let the service be as bad as it may be, until cancelled."""
        while True:
            await asyncio.sleep(self._chance.uniform(0, 1))
            if self._chance.random() < 0.7:
                kind = self._chance.choice(_WRITES)
                fault = self._chance.choice(_FAULTS)
            else:
                kind, fault = self._chance.choice(_READS), self._chance.choice(_FAULTS[:2])
            self._service.fault(kind, times=1, **fault)
            cancel = self._chance.choice(("sigterm", "sigterm", "unheard", "ignored"))
            self._service.settings(cancel=cancel)

    async def _begin_runs(self) -> None:
        """Let each run live that is created, until cancelled."""
        while True:
            for one in self._service.jobs():
                if one.name not in self._living:
                    self._living[one.name] = asyncio.create_task(self._run(one.name))
            await asyncio.sleep(0.1)

    async def _run(self, name: str) -> None:
        """Wait for nodes, train, be moved, and end, unless a cancel ends it.

        A run whose job is deleted trains until somebody cancels it.
        """
        chance = random.Random(f"{name} {self._chance.random()}")
        happen: list[Callable[[], None]] = []
        for _ in range(chance.choice((1, 1, 2))):
            happen += [partial(self._state, name, one) for one in ("Queued", "Running")]
        ends = ("Completed", "Completed", "Failed", "preempted", "Canceled")
        end = "Completed" if self._is_quiet else chance.choice(ends)
        happen.append(partial(self._end, name, end))
        for one in happen:
            is_long = self._service.job(name).state == "Running" and not self._is_quiet
            await asyncio.sleep(chance.uniform(0, _TRAIN_SECONDS if is_long else _WAIT_SECONDS))
            run = self._service.job(name)
            is_over = one is happen[-1] and await self._is_deleted(run.tags["finetune.job"])
            if run.state in ("NotStarted", "Queued", "Running") and not is_over:
                one()

    async def _is_deleted(self, name: str) -> bool:
        try:
            job = await self._client.get(FINE_TUNE_JOBS, name, self._namespace)
        except NotFoundError:
            return True
        return "deletionTimestamp" in job["metadata"]

    def _state(self, name: str, state: str) -> None:
        self._service.set_state(name, state)
        if state == "Running" and self._chance.random() < 0.5:  # a reporter that listens
            heard = Heard(time=time.time()).model_dump_json(exclude_none=True)
            self._service.log_batch(name, tags={HEARD_TAG: heard})

    def _end(self, name: str, how: str) -> None:
        if how == "preempted":
            self._service.preempt(name)
        else:
            if how == "Canceled":
                self._cancelled_in_studio.add(name)
            error = _SERVICE_FAULT if how == "Failed" else None
            self._service.set_state(name, how, error=error)

    async def _settled(self) -> list[str]:
        """Return what is wrong once all is well, or after QUIET_SECONDS."""
        loop = asyncio.get_running_loop()
        end = loop.time() + QUIET_SECONDS + 2 * BOUND_SECONDS
        while (faults := await self._faults()) and loop.time() < end:
            await asyncio.sleep(1.0)
        return faults

    async def _faults(self) -> list[str]:
        listing = await self._client.list(FINE_TUNE_JOBS, self._namespace)
        jobs = {one["metadata"]["name"]: one for one in listing.items}
        told = [one["message"] for one in (await self._client.list(EVENTS, self._namespace)).items]
        runs = self._service.jobs()
        faults = _twice(runs)
        alive = [one for one in runs if one.ended is None]
        for run in alive:
            job = jobs.get(run.tags["finetune.job"])
            if job is None and not any(run.name in message for message in told):
                faults.append(f"run {run.name} is left, and its job is gone")
            elif job is not None and not _awaits_its_end(job["status"], run):
                faults.append(f"run {run.name} is {run.state}, and its job {_said(job['status'])}")
        awaited = {run.tags["finetune.job"] for run in alive}
        for name, job in jobs.items():
            if "deletionTimestamp" in job["metadata"]:
                faults.append(f"{name} is deleted and stays: {_said(job['status'])}")
            elif (at := self._judged_as_cancelled(job)) not in self._cancelled_in_studio | {""}:
                faults.append(f"{at} was cancelled by the operator: {_said(job['status'])}")
            elif job["status"]["phase"] not in ("Succeeded", "Failed") and name not in awaited:
                faults.append(f"{name} is lost: {_said(job['status'])}")
        lost = set(self._names) - self._deleted - set(jobs)
        return faults + [f"{name} is gone, and nobody has deleted it" for name in sorted(lost)]

    def _judged_as_cancelled(self, job: Object) -> str:
        """Return the run of which the operator says that a person has cancelled it, or nothing."""
        for one in job["status"].get("attempts", ()):
            if one.get("failureClass") == FailureClass.DO_NOT_RESTART:
                return f"{job['metadata']['name']}-{job['metadata']['uid']}-{one['number']}"
        return ""

    async def _let_go(self) -> None:
        """Take the finalizers off all jobs, as no operator is left that would."""
        free: Object = {"metadata": {"finalizers": []}}
        for one in (await self._client.list(FINE_TUNE_JOBS, self._namespace)).items:
            name = one["metadata"]["name"]
            try:
                await self._client.patch(FINE_TUNE_JOBS, name, self._namespace, free)
            except NotFoundError:
                continue


def _twice(runs: list[SeenJob]) -> list[str]:
    """Return where two runs are of one attempt, or two attempts of one job lived at one time."""
    faults, by_job = [], defaultdict(list)
    for run in runs:
        by_job[run.tags["finetune.uid"]].append(run)
    for mine in by_job.values():
        numbers = Counter(run.tags["finetune.attempt"] for run in mine)
        faults += [f"{mine[0].name}: two of attempt {n}" for n, many in numbers.items() if many > 1]
        mine.sort(key=lambda run: run.created)
        for before, after in pairwise(mine):
            if before.ended is None or before.ended > after.created:
                faults.append(f"{before.name} lived when {after.name} was created")
    return faults


def _is_of(name: str, run: SeenJob) -> bool:
    return run.tags["finetune.job"] == name


def _awaits_its_end(status: Any, run: SeenJob) -> bool:
    """Say whether the job waits for the run's end, which the service does not confirm."""
    is_newest = run.tags["finetune.attempt"] == str(status["attempt"])
    return is_newest and status["phase"] == "Suspending"


def _said(status: Any) -> str:
    return f"{status['phase']}: {status['conditions'][0]['message']}"


async def lived(api: Api, namespace: str, folder: Path, **chance: int) -> tuple[list[str], str]:
    """Return what went wrong, and what has happened; `chance` is that of `Lives`."""
    async with Lives.begun(api, namespace, folder, **chance) as lives:
        return await lives.live(), lives.told()


def main() -> int:
    """Live as the command line says, and return how to exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--deaths", type=int, default=200)
    given = parser.parse_args()
    with (
        TemporaryDirectory() as made,
        embedded_cluster(folder := Path(made)) as cluster,
        open_api(cluster.kubeconfig) as api,
        api.profile("default", profile()),
        api.namespace("azureml") as namespace,
    ):
        work = lived(api, namespace, folder / "azure", **vars(given))
        faults, told = asyncio.run(work)
    print(told)
    for fault in faults:
        print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())

"""Measures jobs of the ConfigMap backend beside a silent Azure ML workspace, and without one.

`azureml_load.py` calls it. Jobs start and then get an event each, under an operator that has as
many jobs of a workspace that no longer responds, or under an operator without other jobs.
"""

import asyncio
import contextlib
import json
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loop_lag
from bursts import follow
from measured import spread

from azureml_service import ServiceClient
from finetune_operator.backends.azureml.workspace_client import REQUESTS_PER_SECOND
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, NAMESPACES, Object
from support.api.builders import manifest
from support.cluster.operators import OperatorProcess, phase_of

Result = dict[str, Any]

TIMEOUT = 300.0
EVERYTHING = "*"
HASTE = {REQUESTS_PER_SECOND: "50"}
"""Request rate for setup that is not measured: with the default, 500 submissions take 8 minutes."""
UNDER_WAY = ("Starting", "Running")
"""Phases of a started job: the stand-in reports no steps, so its jobs may stay in Starting."""
RUNNING = {"phase": "Running", "ready": "1", "step": "1"}


async def in_pairs(
    pairs: int, kubeconfig: str, run: Callable[[KubeClient, str, bool], Awaitable[Result]]
) -> list[Result]:
    """Run beside a silent workspace and without one; each comes first in every second pair.

    Args:
        pairs: Number of pairs.
        kubeconfig: Configuration for the API server.
        run: Returns the figures of one run in the given namespace; the flag asks for the silent
            workspace.
    """
    made = []
    async with await HttpClient.connect(kubeconfig) as client:
        for number in range(pairs):
            pair = {}
            for is_silent in (False, True) if number % 2 == 0 else (True, False):
                async with namespace(client) as name:
                    one = await run(client, name, is_silent)
                pair["silent" if is_silent else "alone"] = one
            print(f"pair {number}: {json.dumps(pair)}", flush=True)
            made.append(pair)
    return made


def figures(pairs: Sequence[Result]) -> Result:
    """Return the published figures of all pairs, each with its spread."""
    made = {}
    for part in ("status", "loop_lag") if pairs else ():
        alone, silent = ([pair[kind][part] for pair in pairs] for kind in ("alone", "silent"))
        made[f"{part}_p99_seconds_alone"] = spread(alone)
        made[f"{part}_p99_seconds_silent"] = spread(silent)
        made[f"{part}_p99_ratio"] = spread([b / a for a, b in zip(alone, silent, strict=True)])
    return made


@contextlib.asynccontextmanager
async def namespace(client: KubeClient) -> AsyncIterator[str]:
    """Yield a new namespace and delete it with everything in it."""
    made = await client.create(NAMESPACES, {"metadata": {"generateName": "silent-"}})
    name = str(made["metadata"]["name"])
    try:
        yield name
    finally:
        # No operator is left to remove the finalizers.
        for job in (await client.list(FINE_TUNE_JOBS, name)).items:
            free: Object = {"metadata": {"finalizers": []}}
            await client.patch(FINE_TUNE_JOBS, job["metadata"]["name"], name, free)
        await client.delete(NAMESPACES, name)


@dataclass
class BesideAzure:
    """One run of the operator; all times are of the loop's clock.

    Attributes:
        namespace: Namespace of the run, empty at the start.
        jobs: Number of jobs of each backend.
        seconds: Time over which the applies, and then the events, are spread.
        created: Time at which each attempt was first seen, by job.
        told: Time at which each job was first seen running.
        silent: Names of the jobs on Azure ML.
    """

    client: KubeClient
    namespace: str
    jobs: int
    seconds: float
    created: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    silent: Sequence[str] = ()

    async def measure(
        self, kubeconfig: str, lags: Path, service: ServiceClient, is_silent: bool
    ) -> Result:
        """Return the 99th percentiles beside jobs of a silent workspace, or without them."""
        environ = {**service.environ(), **HASTE, loop_lag.ENV_FILE: str(lags)}
        async with self._watching():
            operator = OperatorProcess(
                kubeconfig,
                self.namespace,
                source=Path(__file__).parent,
                environ=environ,
                backends="configmap=loop_lag:ProbedBackend",
            )
            try:
                await asyncio.to_thread(operator.wait_for, "synced")
                silent = self.silent = [f"silent-{one}" for one in range(self.jobs * is_silent)]
                await asyncio.gather(*(self._apply(name, "azureml") for name in silent))
                await self._until(self.told, silent)
                await self._apply("warm-up")
                await self._until(self.created, ["warm-up"])
                service.fault(EVERYTHING, delay=float("inf"))
                began = asyncio.get_running_loop().time()
                await self._each(self._apply, self.created)
                reports = await self._each(self._play, self.told)
                ended = asyncio.get_running_loop().time()
            finally:
                await asyncio.to_thread(operator.end)
                service.clear_faults()
        late = [lag for due, lag in json.loads(lags.read_text()) if began <= due <= ended]
        return {"status": p99(reports), "loop_lag": p99(late)}

    async def _each(
        self, act: Callable[[str], Awaitable[None]], seen: dict[str, float]
    ) -> list[float]:
        """Act on all jobs; return the seconds until each was seen."""
        loop = asyncio.get_running_loop()
        names = [f"job-{number}" for number in range(self.jobs)]
        began, sent = loop.time(), dict[str, float]()

        async def act_in_turn(number: int, name: str) -> None:
            await asyncio.sleep(began + number * self.seconds / self.jobs - loop.time())
            sent[name] = loop.time()
            await act(name)

        await asyncio.gather(*(act_in_turn(*one) for one in enumerate(names)))
        await self._until(seen, names)
        return [seen[name] - sent[name] for name in names]

    async def _until(self, seen: dict[str, float], names: Sequence[str]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not seen.keys() >= set(names):
                self.changed.clear()
                await self.changed.wait()

    async def _apply(self, name: str, backend: str = "configmap") -> None:
        made = manifest(
            name=name,
            model__source="hf://a/b",
            dataset__source="hf://a/c",
            backend={"type": backend},
        )
        del made["metadata"]["namespace"]
        await self.client.create(FINE_TUNE_JOBS, made, self.namespace)

    async def _play(self, name: str) -> None:
        """Set the first attempt of a job to training."""
        change = {"data": RUNNING}
        await self.client.patch(CONFIG_MAPS, f"{name}-1", self.namespace, change)

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """Record when attempts are created and jobs run."""
        notes = {CONFIG_MAPS: self._note_attempt, FINE_TUNE_JOBS: self._note_job}
        tasks = [
            asyncio.create_task(follow(self.client, kind, self.namespace, note, self.changed))
            for kind, note in notes.items()
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note_attempt(self, kind: str, made: Object, now: float) -> None:
        self.created.setdefault(made["metadata"]["name"].removesuffix("-1"), now)

    def _note_job(self, kind: str, made: Object, now: float) -> None:
        name, phases = made["metadata"]["name"], ("Running",)
        if made.get("status") and phase_of(made) in (UNDER_WAY if name in self.silent else phases):
            self.told.setdefault(name, now)


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]

"""How many jobs share the request budget of one Azure ML workspace, and what its silence costs.

    python tests/benchmarks/azureml_load.py [--jobs 500] [--seconds 600] [--pairs 5] [--out FOLDER]

First, all jobs run on the stand-in for Azure ML while an operator starts anew, and now and then
one more is applied or one of them suspended. Then, in turn, jobs of the ConfigMap backend start and
get an event each: under an operator that has jobs of a workspace that answers nothing, and under
one that has none. `make bench-azureml` runs it, and writes to docs/benchmarks.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_cluster import peak_mib
from measured import FOLDER, Limit, commit, figures_table, machine, spread
from silent_workspace import (
    HASTE,
    TIMEOUT,
    UNDER_WAY,
    BesideAzure,
    figures,
    in_pairs,
    namespace,
)

from azureml_service import ServiceClient, running_service
from azureml_service.answers import Record
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object
from support.api.builders import manifest
from support.azureml.azureml_cases import profile
from support.cluster.clusters import embedded_cluster
from support.cluster.operators import OperatorProcess, open_api, phase_of

Result = dict[str, Any]

BUDGET = 2.0
"""Requests a second that an operator sends to a workspace, unless it is told otherwise."""
WINDOW_SECONDS = 10.0
PROBES = 10

_CHECKS = ("compute.get", "environment.get", "sizes.list")
_CREATES, _ENDS = ("job.put",), ("mlflow.runs.set-tag", "job.cancel")
_NOT_BUDGETED = ("token", "discovery.get", "log.get")

LIMITS = {
    "requests_in_10_s": Limit(BUDGET * WINDOW_SECONDS + 1),
    "look_gap_share": Limit(2.0),
    "submit_seconds": Limit(2.0),
    "cancel_seconds": Limit(2.0),
    "rss_mib": Limit(320.0),
    "status_p99_ratio": Limit(2.0, "median"),
}
_MEANING = {
    "requests_in_10_s": "most requests to the workspace in any 10 s",
    "look_gap_seconds": "longest time between two looks at a job, by job",
    "look_gap_share": "the longest of them, over the time in which the budget lets all be looked "
    "at once",
    "submit_seconds": "apply of one more job to the PUT that creates its attempt, with kept "
    "answers about its compute and environment, of the last 5 minutes",
    "asking_submit_seconds": "the same where Azure ML is asked for these first: five requests",
    "cancel_seconds": "suspension of one of the jobs to the first request that ends its attempt",
    "rss_mib": "the operator's peak resident memory, MiB",
    "status_p99_seconds_alone": "event of an attempt of another backend to the status that tells "
    "it, 99th percentile: no job of Azure ML",
    "status_p99_seconds_silent": "the same beside jobs of a workspace that answers nothing",
    "status_p99_ratio": "the last over the one before, pair by pair",
    "loop_lag_p99_ratio": "how late a timer of the operator's event loop is, 99th percentile: "
    "beside those jobs over without them",
}


def main() -> None:
    """Measure, then write azureml.json and azureml.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=500, help="of one workspace")
    parser.add_argument("--seconds", type=float, default=600.0, help="in which they are watched")
    parser.add_argument("--pairs", type=int, default=5, help="of runs beside a silent workspace")
    parser.add_argument("--others", type=int, default=100, help="jobs of either backend there")
    parser.add_argument("--silence", type=float, default=60.0, help="seconds of a run there")
    parser.add_argument("--kubeconfig", help="of an API server; by default one of its own")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    # So that the operator is ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench-azureml was told to end"))
    with world(options.kubeconfig) as (kubeconfig, service, _):
        load = asyncio.run(measure_load(options, kubeconfig, service))
    with world(options.kubeconfig) as (kubeconfig, service, folder):
        pairs = asyncio.run(measure_pairs(options, kubeconfig, service, folder))
    measured = {
        **load,
        **figures(pairs),
        "pairs": pairs,
        "jobs": options.jobs,
        "seconds": options.seconds,
        "others": options.others,
        "silence": options.silence,
        "is_embedded": options.kubeconfig is None,
        "commit": commit(),
        "machine": machine(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "azureml.json").write_text(json.dumps(measured, indent=2) + "\n")
    (options.out / "azureml.md").write_text(page(measured))
    print(page(measured))


@contextlib.contextmanager
def world(kubeconfig: str | None) -> Iterator[tuple[str, ServiceClient, Path]]:
    """Have an API server with our kinds and a profile, the stand-in, and a folder."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if kubeconfig is None:
            kubeconfig = stack.enter_context(embedded_cluster(folder)).kubeconfig
        api = stack.enter_context(open_api(kubeconfig))
        stack.enter_context(api.profile("default", profile()))
        service = running_service(folder / "azure", first_state="Running")
        yield kubeconfig, stack.enter_context(service), folder


async def measure_load(
    options: argparse.Namespace, kubeconfig: str, service: ServiceClient
) -> Result:
    """Return the figures of many jobs in one budget; none where there are no jobs."""
    if not options.jobs:
        return {}
    async with await HttpClient.connect(kubeconfig) as client, namespace(client) as name:
        crowd = Crowd(client, name, kubeconfig, service, options.jobs, options.seconds)
        return await crowd.measure()


async def measure_pairs(
    options: argparse.Namespace, kubeconfig: str, service: ServiceClient, folder: Path
) -> list[Result]:
    """Return the figures of each pair of runs."""

    async def run(client: KubeClient, name: str, is_silent: bool) -> Result:
        one = BesideAzure(client, name, options.others, options.silence / 2)
        return await one.measure(kubeconfig, folder / f"{name}.json", service, is_silent)

    return await in_pairs(options.pairs, kubeconfig, run)


def page(measured: Result) -> str:
    """Return the report for people, as Markdown."""
    where = measured["machine"]
    server = "embedded in the client's process" if measured["is_embedded"] else "a real one"
    lines = [
        "# Jobs of one Azure ML workspace",
        "",
        f"Written by `make bench-azureml`. An operator starts beside {measured['jobs']} jobs of "
        f"one workspace that all run, and is watched for {measured['seconds']:g} s; in these, "
        f"{PROBES} more are applied and {PROBES} of them suspended, one at a time. It may send "
        f"{BUDGET:g} requests a second. Then {measured['others']} jobs of a backend in the cluster "
        f"get an event each, in the course of {measured['silence']:g} s with their starts: under "
        f"an operator that has {measured['others']} jobs of a workspace that answers nothing, and "
        f"under one that has none; {len(measured['pairs'])} pairs. Azure ML is a stand-in that "
        "answers the real SDK over HTTPS, the operator is a process of its own, the API server is "
        f"{server}.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores; Python {where['python']}; commit "
        f"{measured['commit'][:12]}.",
        "",
        *figures_table(measured, _MEANING, LIMITS),
    ]
    return "\n".join(lines) + "\n"


@dataclass
class Crowd:
    """Many jobs of one workspace, which run; all times are of the system's monotonic clock."""

    client: KubeClient
    namespace: str
    kubeconfig: str
    service: ServiceClient
    jobs: int
    seconds: float

    async def measure(self) -> Result:
        """Return the figures of an operator that starts beside them."""
        names = [f"job-{number}" for number in range(self.jobs)]
        async with self._operator(HASTE) as process:
            for name in names:
                await self._apply(name)
            await self._until_running(names)
            peaks = [peak_mib(process.pid)]
        await asyncio.to_thread(self.service.requests, forget=True)
        async with self._operator({}) as process:
            began = asyncio.get_running_loop().time()
            sent = await self._probe(names, began)
            peaks.append(peak_mib(process.pid))
            ended = asyncio.get_running_loop().time()
        records = [
            one
            for one in await asyncio.to_thread(self.service.requests)
            if one.kind not in _NOT_BUDGETED and one.time <= ended
        ]
        watched = set(await self._attempts(names)) - set(sent["cancel"])  # these have an end
        gaps = gaps_between_looks(records, sorted(watched), began, ended)
        submits = seconds_until(records, sent["submit"], _CREATES, ended)
        asking = [any_between(records, _CHECKS, at, at + took) for at, took in submits]
        submitted: dict[str, list[float]] = {"submit_seconds": [], "asking_submit_seconds": []}
        for (_, took), asks in zip(submits, asking, strict=True):
            submitted["asking_submit_seconds" if asks else "submit_seconds"].append(took)
        cancels = seconds_until(records, sent["cancel"], _ENDS, ended)
        return {
            "requests_in_10_s": spread([float(one) for one in counts_in_windows(records)]),
            "look_gap_seconds": spread(gaps),
            "look_gap_share": spread([max(gaps) * BUDGET / self.jobs]),
            **{name: spread(values) for name, values in submitted.items() if values},
            "cancel_seconds": spread([took for _, took in cancels]),
            "rss_mib": spread(peaks),
        }

    async def _probe(self, names: Sequence[str], began: float) -> dict[str, dict[str, float]]:
        """Apply and suspend single jobs in turn, spread over the time; return when, by attempt."""
        loop = asyncio.get_running_loop()
        sent: dict[str, dict[str, float]] = {"submit": {}, "cancel": {}}
        for number in range(2 * PROBES):
            await asyncio.sleep(began + (number + 0.5) * self.seconds / (2 * PROBES) - loop.time())
            now = loop.time()
            if number % 2 == 0:
                made = await self._apply(f"more-{number}")
                sent["submit"][attempt_of(made)] = now
            else:
                name = names[number * len(names) // (2 * PROBES)]
                change = {"spec": {"suspend": True}}
                made = await self.client.patch(FINE_TUNE_JOBS, name, self.namespace, change)
                sent["cancel"][attempt_of(made)] = now
        await asyncio.sleep(began + self.seconds - loop.time())
        return sent

    async def _apply(self, name: str) -> Object:
        made = manifest(
            name=name,
            model__source="hf://a/b",
            dataset__source="hf://a/c",
            backend={"type": "azureml"},
        )
        del made["metadata"]["namespace"]
        return await self.client.create(FINE_TUNE_JOBS, made, self.namespace)

    async def _listed(self) -> dict[str, Object]:
        listing = await self.client.list(FINE_TUNE_JOBS, self.namespace)
        return {one["metadata"]["name"]: one for one in listing.items}

    async def _until_running(self, names: Sequence[str]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while any(phase_of(one) not in UNDER_WAY for one in (await self._listed()).values()):
                await asyncio.sleep(1.0)
        assert len(await self._listed()) == len(names)

    async def _attempts(self, names: Sequence[str]) -> list[str]:
        listed = await self._listed()
        return [attempt_of(listed[name]) for name in names]

    @contextlib.asynccontextmanager
    async def _operator(self, environ: Mapping[str, str]) -> AsyncIterator[OperatorProcess]:
        process = OperatorProcess(
            self.kubeconfig, self.namespace, environ={**self.service.environ(), **environ}
        )
        try:
            await asyncio.to_thread(process.wait_for, "synced")
            yield process
        finally:
            await asyncio.to_thread(process.end)


def attempt_of(job: Object) -> str:
    """Return what Azure ML calls the first attempt of a job."""
    return f"{job['metadata']['name']}-{job['metadata']['uid']}-1"


def counts_in_windows(records: Sequence[Record]) -> list[int]:
    """Return how many requests came in the 10 s from each of them on."""
    times = sorted(one.time for one in records)
    return [bisect_left(times, begin + WINDOW_SECONDS) - index for index, begin in enumerate(times)]


def gaps_between_looks(
    records: Sequence[Record], attempts: Sequence[str], began: float, ended: float
) -> list[float]:
    """Return the longest time between two requests about each attempt, and to either end."""
    times: dict[str, list[float]] = {name: [began] for name in attempts}
    for record in records:
        if record.name in times:
            times[record.name].append(record.time)
    return [
        max(later - earlier for earlier, later in zip(seen, [*seen[1:], ended], strict=True))
        for seen in times.values()
    ]


def seconds_until(
    records: Sequence[Record], sent: Mapping[str, float], kinds: Sequence[str], ended: float
) -> list[tuple[float, float]]:
    """Return when each act was, and how long after it the first request of a kind about it came.

    Where none did, it is the time until `ended`, which it has waited at least.
    """
    first: dict[str, float] = {}
    for record in records:
        if record.kind in kinds and record.time >= sent.get(record.name, ended):
            first.setdefault(record.name, record.time)
    return [(began, first.get(name, ended) - began) for name, began in sent.items()]


def any_between(records: Sequence[Record], kinds: Sequence[str], begin: float, end: float) -> bool:
    """Say whether a request of a kind came in a time."""
    return any(one.kind in kinds and begin <= one.time <= end for one in records)


if __name__ == "__main__":
    main()

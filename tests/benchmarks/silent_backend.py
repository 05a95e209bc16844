"""How other jobs fare while the service of one backend answers nothing.

    python tests/benchmarks/silent_backend.py [--pairs 5] [--kubeconfig FILE] [--out FOLDER]

Jobs of the ConfigMap backend start, and then each gets an event: under an operator that has a
hundred jobs of the silent remote twin, and under one that has none; the two take turns in who comes
first. The API server is embedded in this process unless a kubeconfig names one. `make bench-silent`
runs it, and writes to docs/benchmarks.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loop_lag
from bursts import follow
from measured import FOLDER, Limit, commit, figures_table, machine, spread

from builders import manifest
from clusters import embedded_cluster
from fake_service import RemoteService, served
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, NAMESPACES, Object
from finetune_operator.testing.service_suite import Fate
from operators import OperatorProcess, open_api, phase_of
from remote_backend.http_backend import ENV_URL
from remote_world import let_go

Result = dict[str, Any]

TIMEOUT = 120.0
SILENCE = "did not respond"
"""What each job of the silent service is told before anything is measured."""

RUNNING = {"phase": "Running", "ready": "1", "step": "1"}

LIMITS = {
    "start_p99_ratio": Limit(1.25, "median"),
    "status_p99_ratio": Limit(1.25, "median"),
    "loop_lag_p99_ratio": Limit(2, "median"),
}
_PARTS = {
    "start": "apply of a job to the creation of its attempt",
    "status": "event of an attempt to the status that tells it",
    "loop_lag": "how late a timer of the operator's event loop is",
}
_MEANING = {
    f"{part}_p99_{what}": f"{text}, 99th percentile{more}"
    for part, text in _PARTS.items()
    for what, more in (
        ("seconds_alone", ": no job of the silent service"),
        ("seconds_silent", ": beside its jobs"),
        ("ratio", ": the last over the one before, pair by pair"),
    )
}


def main() -> None:
    """Measure, then write silent-backend.json and silent-backend.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=100, help="of either backend")
    parser.add_argument("--seconds", type=float, default=10.0, help="in which all are applied")
    parser.add_argument("--kubeconfig", help="of an API server; by default one of its own")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    # So that the operator is ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench-silent was told to end"))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        kubeconfig = options.kubeconfig
        if kubeconfig is None:
            kubeconfig = stack.enter_context(embedded_cluster(Path(name))).kubeconfig
        stack.enter_context(open_api(kubeconfig))  # with our kinds
        pairs = asyncio.run(measure(options, kubeconfig, Path(name)))
    measured = {
        **figures(pairs),
        "pairs": pairs,
        "jobs": options.jobs,
        "seconds": options.seconds,
        "is_embedded": options.kubeconfig is None,
        "commit": commit(),
        "machine": machine(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "silent-backend.json").write_text(json.dumps(measured, indent=2) + "\n")
    (options.out / "silent-backend.md").write_text(page(measured))
    print(page(measured))


async def measure(options: argparse.Namespace, kubeconfig: str, folder: Path) -> list[Result]:
    """Return the 99th percentiles of each pair."""

    async def run(client: KubeClient, name: str, is_silent: bool) -> Result:
        one = Run(client, name, options.jobs, options.seconds)
        return await one.measure(kubeconfig, folder / f"{name}.json", is_silent)

    return await in_pairs(options.pairs, kubeconfig, run)


async def in_pairs(
    pairs: int, kubeconfig: str, run: Callable[[KubeClient, str, bool], Awaitable[Result]]
) -> list[Result]:
    """Run beside a silent service and without it, in turn; which comes first changes.

    Args:
        pairs: How many.
        kubeconfig: Of the API server.
        run: Returns the figures of one run in a namespace of its own, beside it or without it.
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


def figures(pairs: Sequence[Result], parts: Iterable[str] = _PARTS) -> Result:
    """Return what is published of the pairs, each with its spread."""
    made = {}
    for part in parts if pairs else ():
        alone, silent = ([pair[kind][part] for pair in pairs] for kind in ("alone", "silent"))
        made[f"{part}_p99_seconds_alone"] = spread(alone)
        made[f"{part}_p99_seconds_silent"] = spread(silent)
        made[f"{part}_p99_ratio"] = spread([b / a for a, b in zip(alone, silent, strict=True)])
    return made


def page(measured: Result) -> str:
    """Return the report for people, as Markdown."""
    where, jobs = measured["machine"], measured["jobs"]
    server = "embedded in the client's process" if measured["is_embedded"] else "a real one"
    lines = [
        "# Other jobs while a service is silent",
        "",
        f"Written by `make bench-silent`. {jobs} jobs of a backend in the cluster are applied in "
        f"{measured['seconds']:g} s, and then each gets an event: under an operator that has no "
        f"other jobs, and under one that has {jobs} more, of a remote backend whose service has "
        "never answered a request, which each of them was told before; "
        f"{len(measured['pairs'])} pairs. The operator is a process of its own, the API server is "
        f"{server}.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores; Python {where['python']}; commit "
        f"{measured['commit'][:12]}.",
        "",
        *figures_table(measured, _MEANING, LIMITS),
    ]
    return "\n".join(lines) + "\n"


@contextlib.asynccontextmanager
async def namespace(client: KubeClient) -> AsyncIterator[str]:
    """Yield a namespace, which goes with all that is in it."""
    made = await client.create(NAMESPACES, {"metadata": {"generateName": "silent-"}})
    name = str(made["metadata"]["name"])
    try:
        yield name
    finally:
        await let_go(client, name)
        await client.delete(NAMESPACES, name)


@dataclass
class Run:
    """One run of the operator; all times are of the loop's clock.

    Attributes:
        namespace: Empty yet.
        jobs: How many of each backend.
        seconds: In which they are applied.
        created: When each attempt was seen first, by its job.
        told: When each job was first seen to run, or to be told of the silence.
    """

    client: KubeClient
    namespace: str
    jobs: int
    seconds: float
    created: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def measure(self, kubeconfig: str, lags: Path, is_silent: bool) -> Result:
        """Return the 99th percentiles, beside the silent service's jobs or without them."""
        service = RemoteService()
        service.fate = lambda verb, name: Fate.IGNORED
        async with self._watching(), served(service) as url:
            operator = OperatorProcess(
                kubeconfig,
                self.namespace,
                source=Path(__file__).parent,
                environ={ENV_URL: url, loop_lag.ENV_FILE: str(lags)},
                backends="configmap=loop_lag:ProbedBackend,remote=remote_backend.http_backend:HttpBackend",
            )
            try:
                await asyncio.to_thread(operator.wait_for, "synced")
                silent = [f"silent-{n}" for n in range(self.jobs * is_silent)]
                await asyncio.gather(*(self._apply(name, "remote") for name in silent))
                await self._until(self.told, silent)
                await self._apply("warm-up")
                await self._until(self.created, ["warm-up"])
                loop = asyncio.get_running_loop()
                began = loop.time()
                starts = await self._each(self._apply, self.created)
                reports = await self._each(self._play, self.told)
                ended = loop.time()
            finally:
                await asyncio.to_thread(operator.end)
        assert not service.runs
        assert bool(service.requests) == is_silent
        late = [lag for due, lag in json.loads(lags.read_text()) if began <= due <= ended]
        made = {"start": starts, "status": reports, "loop_lag": late}
        requests = {"requests": len(service.requests)}
        return {**{part: p99(seconds) for part, seconds in made.items()}, **requests}

    async def _each(
        self, act: Callable[[str], Awaitable[None]], seen: dict[str, float]
    ) -> list[float]:
        """Act on all jobs, and return the seconds until each was seen."""
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
        """Let the first attempt of a job train."""
        change = {"data": RUNNING}
        await self.client.patch(CONFIG_MAPS, f"{name}-1", self.namespace, change)

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """Note when attempts are created and jobs are told to run."""
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
        conditions = made.get("status", {}).get("conditions", ())
        is_hindered = any(SILENCE in one["message"] for one in conditions)
        if conditions and (is_hindered or phase_of(made) == "Running"):
            self.told.setdefault(made["metadata"]["name"], now)


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    main()

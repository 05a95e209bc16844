"""Measures starts of jobs beside another namespace with 10,000 jobs, or 50 of the largest size.

    python tests/benchmarks/bench_tenants.py [--jobs 10000] [--large 50] [--out FILE]

API server and controllers are real; most pods find no node, and stay Pending. A job starts when its
batch Job exists. The starts of namespace B are measured on an idle operator, while namespace A
creates its jobs, and afterwards. `make bench-tenants` runs it.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import operator_lives as lives
from bench_cluster import bench_cluster, peak_mib
from bursts import Sightings, create_all, watching
from measured import commit, machine, spread
from operator_lives import Bench, Result, fine_tune_jobs

from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.client import ClientOptions, KubeClient
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import FINE_TUNE_JOBS, NAMESPACES, Object
from support.cluster.operators import Api
from support.cluster.played_pods import bound_claims

VICTIM, ATTACKER = "b", "a"
CLAIM = "shared"
_TIMEOUT = 1800.0
_PAUSE_SECONDS = 0.5
_KEY, _VALUE = "k{:062d}", "v" * 63


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=50)
    parser.add_argument("--starts", type=int, default=15, help="jobs of B in each measurement")
    parser.add_argument("--kit", type=Path, help="folder of programs that make a control plane")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    # The processes that were started end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench-tenants is terminated"))
    measured: Result = {}
    place = {"commit": commit(), "machine": machine()}
    if options.large:
        measured["large"] = in_cluster(options, options.large, create_large) | place
    if options.jobs:
        measured["many"] = in_cluster(options, options.jobs, create_many) | place
    text = json.dumps(measured, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


async def create_many(client: KubeClient, count: int) -> Result:
    """Create jobs of A that each become a batch Job with one pod."""
    bodies = [_job(f"job-{number}") for number in range(count)]
    await create_all(client, FINE_TUNE_JOBS, bodies, ATTACKER)
    return {}


async def create_large(client: KubeClient, count: int) -> Result:
    """Create jobs of A with as many labels as the API server accepts."""
    least, most = 0, 16_384
    while most - least > 64:
        middle = (least + most) // 2
        body = _labelled("probe", middle)
        try:
            await client.create(FINE_TUNE_JOBS, body, ATTACKER)
        except ApiError:
            most = middle
        else:
            least = middle
            await client.delete(FINE_TUNE_JOBS, "probe", ATTACKER)
            await _gone(client, "probe")
    for number in range(count):
        await client.create(FINE_TUNE_JOBS, _labelled(f"large-{number}", least), ATTACKER)
    stored = await client.get(FINE_TUNE_JOBS, "large-0", ATTACKER)
    return {"labels": least, "storedBytes": len(json.dumps(stored))}


async def _gone(client: KubeClient, name: str) -> None:
    while any(
        one["metadata"]["name"] == name
        for one in (await client.list(FINE_TUNE_JOBS, ATTACKER)).items
    ):
        await asyncio.sleep(_PAUSE_SECONDS)


def _labelled(name: str, count: int) -> Object:
    return _job(name, labels={_KEY.format(number): _VALUE for number in range(count)})


def _job(name: str, **metadata: Object) -> Object:
    (body,) = fine_tune_jobs(1)
    body["metadata"] = {"name": name, **metadata}
    spec = body["spec"]
    spec["topology"]["nodes"] = 1
    for part in ("checkpoint", "output"):
        spec[part]["uri"] = f"pvc://{CLAIM}/{{namespace}}/{{name}}/{part}"
    return body


def in_cluster(
    options: argparse.Namespace,
    count: int,
    create: Callable[[KubeClient, int], Coroutine[Any, Any, Result]],
) -> Result:
    """Measure the starts of B around what A creates, in a cluster of its own."""

    async def run() -> Result:
        limits = ClientOptions(user_agent="bench", request_seconds=60.0)
        async with await HttpClient.connect(str(cluster.kubeconfig), limits) as client:
            where = lives.authority_of(cluster.kubeconfig)
            kubeconfig = await lives.prepare(client, Path(folder), *where)
            for name in (VICTIM, ATTACKER):
                await client.create(NAMESPACES, {"metadata": {"name": name}})
            async with (
                bound_claims(client, [CLAIM], VICTIM),
                bound_claims(client, [CLAIM], ATTACKER),
                Bench(cluster, client, kubeconfig).operator() as process,
                watching(client, VICTIM) as seen_b,
                watching(client, ATTACKER) as seen_a,
            ):
                victim = Victim(client, seen_b, options.starts)
                idle = await victim.starts("idle")
                begun = asyncio.create_task(create(client, count))
                await asyncio.sleep(_PAUSE_SECONDS)
                during = await victim.starts("during")
                created = await begun
                started = len(seen_a.jobs)
                after = await victim.starts("after")
                await seen_a.wait(lambda: len(seen_a.jobs) >= count, _TIMEOUT, "jobs of A start")
                return {
                    "jobs": count,
                    **created,
                    "startedWhenCreated": started,
                    "idleSeconds": idle,
                    "duringSeconds": during,
                    "afterSeconds": after,
                    "endSeconds": await victim.starts("end"),
                    "peakMib": round(peak_mib(process.pid)),
                }

    with bench_cluster(options.kit, nodes=1) as cluster:
        api = Api(str(cluster.kubeconfig))
        api.install_crds()
        api.close()
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            return asyncio.run(run())


class Victim:
    """Namespace B."""

    def __init__(self, client: KubeClient, seen: Sightings, count: int) -> None:
        self._client, self._seen, self._count = client, seen, count

    async def starts(self, prefix: str) -> dict[str, float]:
        """Create jobs one after the other; return the spread of the seconds until each starts."""
        taken = []
        for number in range(self._count):
            name = f"{prefix}-{number}"
            sent = await create_all(self._client, FINE_TUNE_JOBS, [_job(name)], VICTIM)
            child = f"{name}-1"
            await self._seen.wait(lambda c=child: c in self._seen.jobs, _TIMEOUT, child)  # type: ignore[misc]
            taken.append(self._seen.jobs[child] - sent[name])
            await asyncio.sleep(_PAUSE_SECONDS)
        print(prefix, [round(one, 3) for one in taken], flush=True)
        return spread(taken)


if __name__ == "__main__":
    main()

"""The operator beside plain batch Jobs on a real API server: one interleaved run, one report.

    python tests/benchmarks/bench_operator.py [--jobs 300] [--pairs 5] [--out docs/benchmarks]

Nodes are simulated; API server, controllers and scheduler are real. Plain Jobs are the least that
makes two pods, and once more with the operator's own pods, which shows what those cost. All three
take turns in who comes first. `make bench-operator` runs it; the folder is in front of the modules
it imports, so this file is not called operator.py, which would shadow the standard library's.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import operator_lives as lives
from bench_cluster import BenchCluster, bench_cluster
from measured import FOLDER, commit, machine, spread
from operator_lives import Bench, Result, shown
from operator_page import page

from finetune_operator.kube.client import ClientOptions
from finetune_operator.kube.http import HttpClient
from support.cluster.operators import Api

WARM_UP = 20


def main() -> None:
    """Measure everything, then write operator.json and operator.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--takeovers", type=int, default=2)
    parser.add_argument("--singles", type=int, default=20)
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--kit", type=Path, help="folder of programs that make a control plane")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    # So that what was started is ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench-operator was told to end"))
    with bench_cluster(options.kit, options.nodes) as cluster:
        api = Api(str(cluster.kubeconfig))
        api.install_crds()
        api.close()
        measured = asyncio.run(measure(options, cluster))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "operator.json").write_text(json.dumps(measured, indent=2) + "\n")
    (options.out / "operator.md").write_text(page(measured))
    print(page(measured))


async def measure(options: argparse.Namespace, cluster: BenchCluster) -> Result:
    """Return the published figures, and every run they are made from."""
    client = await HttpClient.connect(
        str(cluster.kubeconfig), ClientOptions(user_agent="bench", request_seconds=60.0)
    )
    async with client:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            where = lives.authority_of(cluster.kubeconfig)
            kubeconfig = await lives.prepare(client, Path(folder), *where)
            runs = await measure_all(options, Bench(cluster, client, kubeconfig))
    return {
        **figures(runs),
        "runs": runs,
        "jobs": options.jobs,
        "nodes": options.nodes,
        "versions": {name: version(name) for name in ("kopf", "kubernetes", "aiohttp", "pydantic")},
        "commit": commit(),
        "machine": machine(),
    }


async def measure_all(options: argparse.Namespace, bench: Bench) -> Result:
    """Return every run; what needs a quiet cluster comes before the bursts."""
    for burst in (lives.plain_burst, lives.our_burst):
        await burst(bench, WARM_UP)
    singles = await lives.single_applies(bench, options.singles)
    print(f"single applies: median {statistics.median(singles):.3f} s", flush=True)
    refused = await lives.refusals(bench, options.singles)
    print(f"refusals: {json.dumps(refused)}", flush=True)
    whole = await lives.whole_lives(bench, WARM_UP, options.idle_seconds)
    print(f"whole lives: {json.dumps(whole)}", flush=True)
    pairs = []
    for number in range(options.pairs):
        order = [
            ("plain", lives.plain_burst),
            ("same_pods", lives.same_pods_burst),
            ("ours", lives.our_burst),
        ]
        results = {}
        for name, burst in order if number % 2 == 0 else order[::-1]:
            results[name] = await burst(bench, options.jobs)
            print(f"pair {number}, {name}: {shown(results[name])}", flush=True)
        pairs.append(results)
    kills = []
    for number in range(options.kills):
        kills.append(await lives.killed_burst(bench, options.jobs))
        print(f"kill {number}: {shown(kills[-1])}", flush=True)
    again = await lives.next_attempts(bench, WARM_UP)
    print(f"next attempts: median {statistics.median(again):.3f} s", flush=True)
    takeovers = [await lives.takeover(bench) for _ in range(options.takeovers)]
    return {
        "pairs": pairs,
        "kills": kills,
        "single_applies_seconds": singles,
        "refusals": refused,
        "whole_lives": whole,
        "next_attempts_seconds": again,
        "takeovers_seconds": takeovers,
    }


def figures(runs: Result) -> dict[str, dict[str, float]]:
    """Return what is published, each with its spread."""
    pairs, kills, whole = runs["pairs"], runs["kills"], runs["whole_lives"]

    def ratio(key: str, other: str) -> list[float]:
        return [one["ours"][key] / one[other][key] for one in pairs]

    def cpu_ratio(other: str) -> list[float]:
        others = [one[other]["cluster_cpu_ms_per_job"] for one in pairs]
        return [(a + b) / c for a, b, c in zip(our_cpu, own_cpu, others, strict=True)]

    plain_cpu = [one["plain"]["cluster_cpu_ms_per_job"] for one in pairs]
    own_cpu = [one["ours"]["operator_cpu_ms_per_job"] for one in pairs]
    our_cpu = [one["ours"]["cluster_cpu_ms_per_job"] for one in pairs]
    surplus = [one["ours"]["surplus_children"] for one in pairs]
    minutes = whole["jobs"] * whole["idle_seconds"] / 60
    values: dict[str, list[float]] = {
        "all_running_ratio_plain_jobs": ratio("all_running_seconds", "plain"),
        "cpu_ratio_plain_jobs": cpu_ratio("plain"),
        "all_running_ratio_same_pods": ratio("all_running_seconds", "same_pods"),
        "cpu_ratio_same_pods": cpu_ratio("same_pods"),
        "operator_cpu_ratio_plain_jobs": [
            own / plain for own, plain in zip(own_cpu, plain_cpu, strict=True)
        ],
        "rss_mib": [one["ours"]["operator_peak_mib"] for one in pairs],
        "api_writes_per_job": [_per_job(whole, "start", is_event=False)],
        "api_events_per_job": [_per_job(whole, "start", is_event=True)],
        "api_final_writes_per_job": [_per_job(whole, "end", is_event=False)],
        "api_final_events_per_job": [_per_job(whole, "end", is_event=True)],
        "idle_writes_per_job_minute": [sum(whole["idle"].values()) / minutes],
        "apply_to_job_seconds": runs["single_applies_seconds"],
        "refusal_told_seconds": runs["refusals"]["told_seconds"],
        "refusal_mended_seconds": runs["refusals"]["mended_seconds"],
        "restart_synced_seconds": [one["drained_seconds"] for one in kills],
        "restart_idle_seconds": [one["idle_seconds"] for one in kills],
        "duplicate_children": surplus + [one["surplus_children"] for one in kills],
        "pods_gone_to_next_attempt_seconds": runs["next_attempts_seconds"],
        "standby_takeover_seconds": runs["takeovers_seconds"],
    }
    return {name: spread(ones) for name, ones in values.items()}


def _per_job(whole: Result, part: str, *, is_event: bool) -> float:
    counts = whole[part].items()
    num: int = sum(n for what, n in counts if what.endswith(" events") == is_event)
    return num / int(whole["jobs"])


if __name__ == "__main__":
    main()

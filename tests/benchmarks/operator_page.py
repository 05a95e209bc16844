"""The report of `make bench-operator` for people, as Markdown.

    python tests/benchmarks/operator_page.py [FOLDER]

A function of what was measured alone: the command writes operator.md of FOLDER (docs/benchmarks)
anew from the operator.json beside it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from measured import FOLDER, Limit, figures_table

Result = dict[str, Any]

LIMITS = {
    "all_running_ratio_plain_jobs": Limit(1.8, "median"),
    "cpu_ratio_plain_jobs": Limit(1.8, "median"),
    "operator_cpu_ratio_plain_jobs": Limit(0.4, "median"),
    "rss_mib": Limit(160),
    "api_writes_per_job": Limit(6),
    "api_events_per_job": Limit(2),
    "api_final_writes_per_job": Limit(1),
    "api_final_events_per_job": Limit(1),
    "idle_writes_per_job_minute": Limit(0),
    "apply_to_job_seconds": Limit(0.2, "median"),
    "refusal_told_seconds": Limit(1),
    "refusal_mended_seconds": Limit(1),
    "restart_synced_seconds": Limit(5),
    "duplicate_children": Limit(0),
    "pods_gone_to_next_attempt_seconds": Limit(1),
    "standby_takeover_seconds": Limit(17),
}
"""What each figure was to reach; those that only explain others have none."""

_MEANING = {
    "all_running_ratio_plain_jobs": "time until all pods run, over that of plain batch Jobs",
    "cpu_ratio_plain_jobs": "CPU of the whole control plane and the operator, over that of plain "
    "batch Jobs",
    "all_running_ratio_same_pods": "the same over plain batch Jobs with the operator's own pods",
    "cpu_ratio_same_pods": "the same over plain batch Jobs with the operator's own pods",
    "operator_cpu_ratio_plain_jobs": "the operator's own CPU, over all of a plain batch Job's",
    "rss_mib": "the operator's peak resident memory, MiB",
    "api_writes_per_job": "the operator's writes until Running=True: children and status",
    "api_events_per_job": "Events until then",
    "api_final_writes_per_job": "writes from Running=True to Complete",
    "api_final_events_per_job": "Events from then",
    "idle_writes_per_job_minute": "writes a minute for a job that runs and says nothing new",
    "apply_to_job_seconds": "apply of a FineTuneJob to its batch Job, idle cluster, seconds",
    "refusal_told_seconds": "apply of a FineTuneJob whose profile is missing to Accepted=False, "
    "idle cluster, seconds",
    "refusal_mended_seconds": "creation of that profile to the job's batch Job, seconds",
    "restart_synced_seconds": "killed in the middle of the burst: start of the next process until "
    "all is listed and every job that was there then is looked at, seconds",
    "restart_idle_seconds": "the same until nothing is left in the queue, of what the rest of the "
    "burst brought since",
    "duplicate_children": "children beyond one of each kind a job, in all bursts",
    "pods_gone_to_next_attempt_seconds": "last pod of an attempt gone to the next attempt's batch "
    "Job, seconds",
    "standby_takeover_seconds": "leader killed to its standby leading, Lease of 15 s, seconds",
}


def page(measured: Result) -> str:
    """Return the whole report."""
    where, versions = measured["machine"], measured["versions"]
    libraries = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines = [
        "# The operator beside plain batch Jobs",
        "",
        "Written by `make bench-operator`; every figure is of that one run. API server, "
        "controllers and scheduler are real and share the machine with the operator and the "
        f"client; {measured['nodes']} nodes are simulated. The scheduler's limit of requests, "
        "which alone would hold plain Jobs back, is taken away.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores; Python {where['python']}, {libraries}; "
        f"commit {measured['commit'][:12]}.",
        "",
        *figures_table(measured, _MEANING, LIMITS),
    ]
    lines += ["", *_pairs(measured), "", *_processes(measured), "", *_writes(measured)]
    return "\n".join(lines) + "\n"


def _pairs(measured: Result) -> list[str]:
    jobs = measured["jobs"]
    lines = [
        "## Bursts",
        "",
        f"{jobs} FineTuneJobs of 2 pods created at once, and {jobs} plain batch Jobs of 2 pods, in "
        "turn; a new operator process for each burst. Plain Jobs are the least that makes pods (no "
        "volume, no environment, no security context); `same pods` are plain Jobs with exactly the "
        "operator's pods. CPU counts from the first request until 3 s after the last pod runs.",
        "",
        "| pair | ours, all run, s | plain, s | same pods, s | CPU ms a job, ours | the operator's "
        "| plain | same pods | peak MiB |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for number, pair in enumerate(measured["runs"]["pairs"]):
        ours, plain, same = pair["ours"], pair["plain"], pair["same_pods"]
        own = ours["operator_cpu_ms_per_job"]
        lines.append(
            f"| {number} | {ours['all_running_seconds']:.1f} | {plain['all_running_seconds']:.1f} "
            f"| {same['all_running_seconds']:.1f} "
            f"| {ours['cluster_cpu_ms_per_job'] + own:.1f} | {own:.1f} | "
            f"{plain['cluster_cpu_ms_per_job']:.1f} | {same['cluster_cpu_ms_per_job']:.1f} | "
            f"{ours['operator_peak_mib']:.0f} |"
        )
    return lines


def _processes(measured: Result) -> list[str]:
    """Return where the CPU time of the first pair went."""
    pair = measured["runs"]["pairs"][0]
    ours = pair["ours"]["cluster_cpu_ms_per_job_by_process"]
    plain = pair["plain"]["cluster_cpu_ms_per_job_by_process"]
    own = pair["ours"]["operator_cpu_ms_per_job"]
    lines = [
        "CPU of the first pair by process, ms a job:",
        "",
        "| process | ours | plain |",
        "|---|---:|---:|",
    ]
    lines += [f"| {name} | {ours[name]:.1f} | {plain[name]:.1f} |" for name in ours]
    return [*lines, f"| operator | {own:.1f} | 0.0 |"]


def _writes(measured: Result) -> list[str]:
    """Return what the operator's user wrote, as the API server's audit log has it."""
    whole = measured["runs"]["whole_lives"]
    lines = [
        "## Writes",
        "",
        f"What the operator's account wrote for {whole['jobs']} jobs, from the API server's audit "
        f"log; Leases apart. Their pods are played: they run {whole['pods_start_seconds']:g} s "
        f"after they have a node, and train {whole['pods_load_seconds']:g} s later.",
        "",
        "| write | until Running | idle | until Complete |",
        "|---|---:|---:|---:|",
    ]
    parts = ("start", "idle", "end")
    for what in sorted({name for part in parts for name in whole[part]}):
        cells = " | ".join(str(whole[part].get(what, 0)) for part in parts)
        lines.append(f"| {what} | {cells} |")
    return lines


def main() -> None:
    """Write the page anew."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    measured = json.loads((folder / "operator.json").read_text())
    (folder / "operator.md").write_text(page(measured))


if __name__ == "__main__":
    main()

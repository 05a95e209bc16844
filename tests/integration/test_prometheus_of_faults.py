"""Each fault lights its own alert and no other, on a real Prometheus with times divided by 30.

The series are played: pages over HTTP say what four ranks would with such a step, and the page of
the operator names the suspect that the nodes of the job would find. Who is a suspect is tested with
ranks that are really slow or stuck, where suspects are found.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from helm_chart import needs_helm
from launches import until
from monitoring.windows import Windows
from played_faults import FAULTS, NODES, PlayedJob
from prometheus import Prometheus, Target, needs_prometheus, scraped_by
from served_pages import served

pytestmark = [pytest.mark.full, needs_prometheus, needs_helm]

WINDOWS = Windows().divided(30)
OWN = {
    "slow-rank": "FineTuneRankSlow",
    "stuck-rank": "FineTuneRankStuck",
    "data-starvation": "FineTuneDataStarved",
    "slow-storage": "FineTuneCheckpointSlow",
    "slow-network": "FineTuneNetworkSlow",
}


def of_operator(jobs: dict[str, PlayedJob]) -> str:
    """Return the operator's page: it leads, all jobs run, and it knows the suspects."""
    lines = ["finetune_operator_leader 1"]
    for name, job in jobs.items():
        of_job = f'namespace="team",finetunejob="{name}"'
        lines.append(f'finetune_job_status_phase{{{of_job},phase="Running"}} 1')
        lines += [f"finetune_job_suspect{{{of_job},{one}" for one in job.suspects]
    return "\n".join(lines) + "\n"


@contextmanager
def scraped(folder: Path, jobs: dict[str, PlayedJob]) -> Iterator[Prometheus]:
    pages = {
        f"/{name}/{node}": partial(job.page, node)
        for name, job in jobs.items()
        for node in range(len(NODES))
    }
    with served({**pages, "/metrics": partial(of_operator, jobs)}) as address:
        pods = scraped_by("PodMonitor")
        targets = [
            Target(
                f"{name}-{node}",
                address,
                {
                    "namespace": "team",
                    "__meta_kubernetes_pod_label_finetune_dev_job": name,
                    "__meta_kubernetes_pod_node_name": NODES[node],
                },
                {**pods, "path": f"/{name}/{node}"},
            )
            for name in jobs
            for node in range(len(NODES))
        ]
        targets.append(Target("operator", address, endpoint=scraped_by("ServiceMonitor")))
        with Prometheus(folder, targets, WINDOWS) as prometheus:
            yield prometheus


def test_each_fault_lights_its_own_alert_and_no_other(tmp_path: Path) -> None:
    jobs = {name: PlayedJob(name) for name in FAULTS}
    lit: dict[str, set[str]] = {name: set() for name in jobs}

    with scraped(tmp_path, jobs) as prometheus:

        def look() -> None:
            for one in prometheus.firing():
                lit[one.get("finetunejob", "")].add(one["alertname"])

        def has_been_well(since: float) -> bool:
            look()
            return time.time() - since > 3 * WINDOWS.rate

        until(partial(has_been_well, time.time()), 120)
        assert lit == {name: set() for name in jobs}
        for job in jobs.values():
            job.break_down()

        def is_told() -> bool:
            look()
            return all(OWN[name] in lit[name] for name in jobs)

        until(is_told, 240)
        texts = prometheus.told()
        # As long again as the alert that waits longest.
        until(partial(has_been_well, time.time() + WINDOWS.long - 2 * WINDOWS.rate), 120)

    assert lit == {name: {alert} for name, alert in OWN.items()}
    assert any("Rank 3 on node node-1 of job team/slow-rank" in one for one in texts)
    assert any("Rank 3 on node node-1 of job team/stuck-rank" in one for one in texts)
    assert any("That is rank 3 on node node-1." in one for one in texts)

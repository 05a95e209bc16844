"""Each fault lights its own alert and no other, on a real Prometheus with times divided by 30.

The ranks are real, but for their compute, which is a sleep; so are their pages, what their nodes
find, the network between two of them, and the operator, which tells of suspects. The backend alone
is played: it hands the operator what the page of rank 0 says, as that of `kubernetes` does.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from finetune_trainer.config import Progress
from monitoring.windows import Windows
from support.charts.helm_chart import needs_helm
from support.charts.prometheus import Prometheus, Target, needs_prometheus, scraped_by
from support.cluster.clusters import embedded_cluster
from support.cluster.operators import OperatorProcess, open_api, wait_until
from support.launch.faulty_ranks import FaultyRanks
from support.launch.launches import free_port, launch, train_config, until
from support.launch.two_networks import LINK, Network, needs_networks, two_networks
from support.telemetry.node_pages import free_ports, progress_of

pytestmark = [pytest.mark.full, needs_prometheus, needs_helm]

WINDOWS = Windows().divided(30)
OWN = {
    "slow-rank": "FineTuneRankSlow",
    "stuck-rank": "FineTuneRankStuck",
    "data-starvation": "FineTuneDataStarved",
    "slow-storage": "FineTuneCheckpointSlow",
    "slow-network": "FineTuneNetworkSlow",
}
OF_ONE_NODE = {
    "well": ("none", "4"),
    "slow-rank": ("slower", "4"),
    "stuck-rank": ("asleep", "10"),
    "data-starvation": ("starved", "4"),
    "slow-storage": ("slow storage", "4"),
}
"""What one of four ranks does, and by how much its node shortens the times of its verdict."""


@dataclass
class Job:
    """The pages of a job by the names of its nodes, rank 0's node first."""

    pages: dict[str, str]
    suspected: set[int] = field(default_factory=set)

    def progress(self) -> str | None:
        """Return what rank 0's page says; None while it says nothing."""
        text = progress_of(next(iter(self.pages.values())))
        if text is not None:
            self.suspected |= {one.rank for one in Progress.model_validate_json(text).suspects}
        return text

    def targets(self, name: str, namespace: str) -> list[Target]:
        return [
            Target(
                f"{name}-{node}",
                page,
                {
                    "namespace": namespace,
                    "__meta_kubernetes_pod_label_finetune_dev_job": name,
                    "__meta_kubernetes_pod_node_name": node,
                },
                scraped_by("PodMonitor"),
            )
            for node, page in self.pages.items()
        ]


@contextmanager
def one_node(folder: Path, name: str) -> Iterator[Job]:
    fault, speed = OF_ONE_NODE[name]
    ranks = FaultyRanks(folder / name, 4, fault, 3, FINETUNE_WATCH_SPEED=speed, FAULT_STEP="60")
    try:
        yield Job({"node-a": ranks.url.removeprefix("http://").removesuffix("/metrics")})
    finally:
        ranks.close()


@contextmanager
def over_a_network(folder: Path, networks: tuple[Network, Network]) -> Iterator[Job]:
    """Run a rank in each of two networks, which add up 4 MB in each step."""
    store, port = free_port(), free_ports(1)
    launches = []
    try:
        for node, network in enumerate(networks):
            own = folder / f"node-{node}"
            own.mkdir()
            config = train_config(
                own,
                run_dir=str(folder / "run"),
                world={"nnodes": 2, "nproc_per_node": 1},
                telemetry={"metrics_port": port, "metrics_host": "0.0.0.0"},
            )
            environ = {
                "FINETUNE_NODE_RANK": str(node),
                "FINETUNE_NODE_NAME": f"node-{node}",
                "FINETUNE_RDZV_ENDPOINT": f"{networks[0].address}:{store}",
                "GLOO_SOCKET_IFNAME": LINK,
                "FAULT": "none",
                "FAULT_FLOATS": "1000000",
            }
            launches.append(
                launch(config, "support.launch.faulty_ranks:work", environ, network.run_by)
            )
        yield Job({f"node-{n}": f"{one.outside}:{port}" for n, one in enumerate(networks)})
    finally:
        for one in launches:
            one.process.kill()
            one.wait()


@needs_networks
def test_each_fault_lights_its_own_alert_and_no_other(tmp_path: Path) -> None:
    with ExitStack() as stack:
        enter = stack.enter_context
        cluster = enter(embedded_cluster(tmp_path))
        api = enter(open_api(cluster.kubeconfig))
        namespace = enter(api.namespace("team"))
        operator = enter(OperatorProcess(cluster.kubeconfig, namespace))
        networks = enter(two_networks())
        jobs = {name: enter(one_node(tmp_path, name)) for name in OF_ONE_NODE}
        jobs["slow-network"] = enter(over_a_network(tmp_path, networks))
        port = operator.wait_for("started")["health_port"]
        operator.wait_for("synced")
        for name in jobs:
            api.apply(namespace, name)
        wait_until(lambda: len(api.attempts(namespace)) == len(jobs), 30)

        def hand_over(name: str, job: Job) -> bool:
            """Give the operator what the page says."""
            said = job.progress()
            if said is not None:
                api.play(namespace, f"{name}-1", phase="Running", ready="1", progress=said)
            return said is not None

        for name, job in jobs.items():
            until(partial(hand_over, name, job), 120)
        (tmp_path / "prometheus").mkdir()
        targets = [one for name, job in jobs.items() for one in job.targets(name, namespace)]
        ops = Target("operator", f"127.0.0.1:{port}", {}, scraped_by("ServiceMonitor"))
        prometheus = enter(Prometheus(tmp_path / "prometheus", [*targets, ops], WINDOWS))
        lit: dict[str, set[str]] = {name: set() for name in ("", *jobs)}
        told: dict[str, str] = {}

        def look() -> None:
            for name, job in jobs.items():
                hand_over(name, job)
            for one in prometheus.firing():
                job_name = one.labels.get("finetunejob", "")
                lit[job_name].add(one.labels["alertname"])
                told.setdefault(job_name, one.text)

        def is_over(end: float) -> bool:
            look()
            return time.time() > end

        def is_told() -> bool:
            look()
            return all(OWN[name] in lit[name] for name in OWN)

        until(partial(is_over, time.time() + 2 * WINDOWS.rate), 120)
        for network in networks:
            network.limit("100mbit")
        try:
            until(is_told, 180)
        except TimeoutError:
            pytest.fail(
                f"{lit}; suspected: { {name: one.suspected for name, one in jobs.items()} }"
            )
        # As long again as the alert that waits longest.
        until(partial(is_over, time.time() + WINDOWS.long), 120)

    assert lit == {"": set(), "well": set(), **{name: {alert} for name, alert in OWN.items()}}
    for name in ("slow-rank", "stuck-rank"):
        assert f"Rank 3 on node node-a of job {namespace}/{name}" in told[name]
    for name in ("data-starvation", "slow-storage"):
        assert "rank 3 on node node-a." in told[name]

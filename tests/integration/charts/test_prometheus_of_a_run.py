"""A real Prometheus scrapes a real run of two processes and a real operator; each panel answers.

Both are scraped as the chart's monitors say. Panels that need a GPU, or that only show what goes
wrong, are asked in `test_prometheus_of_recorded_series`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from finetune_trainer.config.metrics import Needs
from monitoring.board import Query
from monitoring.boards import boards
from monitoring.windows import Windows
from support.charts.helm_chart import needs_helm
from support.charts.prometheus import Prometheus, Target, filled, needs_prometheus, scraped_by
from support.cluster.clusters import embedded_cluster
from support.cluster.operators import Api, OperatorProcess, open_api, wait_until
from support.launch.launches import until
from support.telemetry.node_pages import progress_of
from support.telemetry.trained_page import training

pytestmark = [pytest.mark.full, needs_prometheus, needs_helm]

WINDOWS = Windows().divided(30)
NODE = "node-a"
JOB = "tiny"


@dataclass
class PlayedOperator:
    """A real operator, of whose jobs the test plays what becomes of them.

    Attributes:
        address: of its page.
        namespace: of its jobs.
    """

    address: str
    namespace: str
    api: Api
    num_ended: int = 0

    def train(self, job: str, attempt: int = 1) -> None:
        """Let an attempt make its first step, once the operator has made it."""
        name = f"{job}-{attempt}"
        wait_until(lambda: name in self.api.attempts(self.namespace), 60)
        self.api.play(self.namespace, name, phase="Running", ready="1", step="1")
        wait_until(lambda: self.api.phase(self.namespace, job) == "Running", 60)

    def hand_over(self, page: str) -> None:
        """Report the progress on a page to the operator as progress of the running job."""
        text = progress_of(page)
        if text is not None:
            self.api.play(self.namespace, f"{JOB}-1", phase="Running", ready="1", progress=text)

    def end_one(self) -> None:
        """Let one more job train, be preempted, train again and end."""
        self.num_ended += 1
        job = f"short-{self.num_ended}"
        self.api.apply(self.namespace, job)
        self.train(job)
        self.api.play(self.namespace, f"{job}-1", phase="Failed", code="75", gone="yes")
        self.train(job, 2)
        self.api.play(self.namespace, f"{job}-2", phase="Succeeded", code="0", gone="yes")
        wait_until(lambda: self.api.phase(self.namespace, job) == "Succeeded", 60)


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedOperator]:
    """An operator with one job that runs."""
    with (
        embedded_cluster(tmp_path_factory.mktemp("cluster")) as cluster,
        open_api(cluster.kubeconfig) as api,
        api.namespace("team") as namespace,
        OperatorProcess(cluster.kubeconfig, namespace) as process,
    ):
        port = process.wait_for("started")["health_port"]
        process.wait_for("synced")
        made = PlayedOperator(f"127.0.0.1:{port}", namespace, api)
        api.apply(namespace, JOB)
        made.train(JOB)
        yield made


def test_every_panel_of_a_healthy_run_answers(operator: PlayedOperator, tmp_path: Path) -> None:
    variables = {"namespace": operator.namespace, "finetunejob": JOB, "node": NODE}
    panels = [
        (board, panel)
        for board in boards(WINDOWS)
        for panel in board.panels
        if panel.needs is Needs.NOTHING and not panel.is_empty_when_well
    ]
    silent: dict[str, Query] = {
        f"{board.name}: {panel.title}: {number}": query
        for board, panel in panels
        for number, query in enumerate(panel.queries)
        if "mfu" not in query.expr  # a column of the table of all jobs
    }
    silent |= {
        f"{board.name}: variable {one.name}": Query(
            one.query.removeprefix("label_values(").rpartition(",")[0]
        )
        for board in boards(WINDOWS)
        for one in board.variables
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "prometheus").mkdir()
    with training(tmp_path / "run") as address:
        discovered = {
            "namespace": operator.namespace,
            "__meta_kubernetes_pod_label_finetune_dev_job": JOB,
            "__meta_kubernetes_pod_node_name": NODE,
        }
        targets = [
            Target("jobs", address, discovered, scraped_by("PodMonitor")),
            Target(
                "operator", operator.address, {"namespace": "ops"}, scraped_by("ServiceMonitor")
            ),
        ]
        with Prometheus(tmp_path / "prometheus", targets, WINDOWS) as prometheus:

            def has_every_panel_answered() -> bool:
                operator.hand_over(address)
                operator.end_one()
                for name, query in list(silent.items()):
                    answer = prometheus.ask(filled(query.expr, variables, WINDOWS))
                    if any(math.isfinite(value) for _, value in answer):
                        del silent[name]
                return not silent

            try:
                until(has_every_panel_answered, 120)
            except TimeoutError:
                pytest.fail(f"these have no answer: {silent}")

            ranks = prometheus.ask("finetune_train_steps_total")
            assert {one["rank"] for one, _ in ranks} == {"0", "1"}
            wanted = {"namespace": operator.namespace, "finetunejob": JOB, "node": NODE}
            assert all(wanted.items() <= one.items() for one, _ in ranks)
            phase = f'finetune_job_status_phase{{phase="Running",finetunejob="{JOB}"}}'
            ((labels, runs),) = prometheus.ask(phase)
            assert (labels["namespace"], runs) == (operator.namespace, 1)
            assert prometheus.ask('{__name__=~".+",exported_namespace!=""}') == []

"""Panels that need a GPU, or show only what goes wrong, answer on series that a test serves."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from finetune_trainer.config.metrics import Needs
from monitoring.boards import boards
from monitoring.windows import Windows
from support.charts import recorded_series
from support.charts.helm_chart import needs_helm
from support.charts.prometheus import Prometheus, Target, filled, needs_prometheus, scraped_by
from support.charts.recorded_series import GPUS
from support.charts.served_pages import Page, served
from support.launch.launches import until

pytestmark = [needs_prometheus, needs_helm]

WINDOWS = Windows().divided(30)
VARIABLES = {"namespace": "team", "finetunejob": "llama", "node": "node-a"}
RECORDED = {
    "finetune_gpu:utilization:ratio",
    "finetune_gpu:memory_used:bytes",
    "finetune_gpu:power:watts",
    "finetune_gpu:temperature:celsius",
    "finetune_gpu:clock:hertz",
}


@contextmanager
def scraped(folder: Path, gpus: Callable[[], str]) -> Iterator[Prometheus]:
    pages: dict[str, Page] = {
        "/gpus": gpus,
        "/metrics": recorded_series.ranks_page,
        "/operator": partial(recorded_series.operator_page, "team", "llama"),
    }
    pods, operator = scraped_by("PodMonitor"), scraped_by("ServiceMonitor")
    discovered = {
        "namespace": "team",
        "__meta_kubernetes_pod_label_finetune_dev_job": "llama",
        "__meta_kubernetes_pod_node_name": "node-a",
    }
    with served(pages) as address:
        targets = [
            Target("ranks", address, discovered, pods),
            Target("operator", address, {}, {**operator, "path": "/operator"}),
        ]
        if gpus is recorded_series.own_page:
            targets.append(Target("gpus", address, discovered, {**pods, "path": "/gpus"}))
        else:
            targets.append(Target("dcgm", address, {}, {"path": "/gpus"}))
        with Prometheus(folder, targets, WINDOWS) as prometheus:
            yield prometheus


def test_panels_that_a_healthy_run_without_gpu_leaves_empty_answer(tmp_path: Path) -> None:
    silent = {
        f"{board.name}: {panel.title}: {number}": query
        for board in boards(WINDOWS)
        for panel in board.panels
        if panel.needs is Needs.GPU or panel.is_empty_when_well
        for number, query in enumerate(panel.queries)
    }
    assert silent
    with scraped(tmp_path, recorded_series.own_page) as prometheus:

        def has_every_panel_answered() -> bool:
            for name, query in list(silent.items()):
                answer = prometheus.ask(filled(query.expr, VARIABLES, WINDOWS))
                if any(math.isfinite(value) for _, value in answer):
                    del silent[name]
            return not silent

        try:
            until(has_every_panel_answered, 60)
        except TimeoutError:
            pytest.fail(f"these have no answer: {silent}")


@pytest.mark.full
def test_gpus_are_the_same_series_by_our_exporter_and_by_dcgms(tmp_path: Path) -> None:
    found: dict[str, dict[str, set[tuple[str, str]]]] = {}
    ranks: dict[str, set[tuple[str, str]]] = {}
    for name, page in (("own", recorded_series.own_page), ("dcgm", recorded_series.dcgm_page)):
        folder = tmp_path / name
        folder.mkdir()
        with scraped(folder, page) as prometheus:

            def is_all_recorded(prometheus: Prometheus = prometheus, name: str = name) -> bool:
                found[name] = {
                    record: {(one["gpu"], one["node"]) for one, _ in prometheus.ask(record)}
                    for record in RECORDED
                }
                ranks[name] = {
                    (one["gpu"], one["rank"])
                    for one, _ in prometheus.ask(
                        "finetune_gpu:power:watts"
                        " * on (gpu) group_left (rank) finetune_gpu:rank:info"
                    )
                }
                return all(found[name].values()) and bool(ranks[name])

            until(is_all_recorded, 60)
    assert ranks["own"] == ranks["dcgm"] == set(zip(GPUS, "01", strict=True))
    assert found["own"] == found["dcgm"]
    assert set(found["own"]["finetune_gpu:power:watts"]) == {(gpu, "node-a") for gpu in GPUS}

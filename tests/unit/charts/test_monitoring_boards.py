"""The chart's dashboards: known metrics and labels, and JSON that a Grafana can place and draw."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from finetune_trainer.config.metrics import Needs
from monitoring.board import COLUMNS, Board, Kind, Panel
from monitoring.boards import boards
from monitoring.generate import FILES
from monitoring.groups import alerts_of, rules_of
from monitoring.known import CATALOGUE, OF_DCGM, queries
from monitoring.windows import Windows
from support.charts.helm_chart import needs_helm, of_kind, rendered

# What another one shows as well, or who looks for a fault asks by hand.
NOT_ASKED = {
    "finetune_comm_exposed_seconds_total",
    "finetune_comm_last_completed_seq",
    "finetune_gpu_memory_bandwidth_utilization_ratio",
    "finetune_gpu_pcie_errors_total",
    "finetune_gpu_pcie_link_width",
    "finetune_gpu_recovery_action",
    "finetune_job_checkpoint_age_seconds",
    "finetune_job_ended_gpu_seconds_total",
    "finetune_job_eta_seconds",
    "finetune_job_gpu_seconds",
    "finetune_job_info",
    "finetune_job_last_recovery_seconds",
    "finetune_job_progress_ratio",
    "finetune_operator_backlog_jobs",
    "finetune_operator_build_info",
    "finetune_train_alloc_retries_total",
    "finetune_train_checkpoint_last_step",
    "finetune_train_epoch_ratio",
    "finetune_train_ooms_total",
    "finetune_train_samples_total",
}

WINDOWS = Windows()
BOARDS = boards(WINDOWS)
every_board = pytest.mark.parametrize("board", BOARDS, ids=lambda one: one.name)
every_panel = pytest.mark.parametrize(
    ("board", "panel"),
    [
        pytest.param(board, panel, id=f"{board.name}: {panel.title}")
        for board in BOARDS
        for panel in board.panels
    ],
)


def written(board: Board) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((FILES / "dashboards" / f"{board.name}.json").read_text())
    return made


def in_grafana(board: Board) -> list[dict[str, Any]]:
    return [one for one in written(board)["panels"] if one["type"] != "row"]


@every_panel
def test_a_panel_asks_for_what_there_is_and_calls_its_series_by_labels_they_have(
    board: Board, panel: Panel
) -> None:
    known = queries(WINDOWS)
    for query in panel.queries:
        labels = known.labels_of(query.expr.replace("$__rate_interval", "5m"))

        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= labels
        variables = set(re.findall(r"\$(\w+)", query.expr)) - {"__rate_interval"}
        assert variables <= {one.name for one in board.variables}
        if panel.kind not in (Kind.TABLE, Kind.HEATMAP, Kind.NUMBER):
            assert query.legend


@every_panel
def test_a_panel_says_whether_it_needs_a_gpu(board: Board, panel: Panel) -> None:
    needs = {one.name: one.needs for one in (*CATALOGUE, *OF_DCGM)}
    known = queries(WINDOWS)
    asked = {name for one in panel.queries for name in known.names_in(_plain(one.expr))}

    if any(needs.get(name) is Needs.GPU or "gpu" in name for name in asked):
        assert panel.needs is Needs.GPU or len(panel.queries) > 1


def _plain(expr: str) -> str:
    return expr.replace("$__rate_interval", "5m")


@every_board
def test_a_variable_asks_for_what_there_is(board: Board) -> None:
    known = queries(WINDOWS)
    for variable in board.variables:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.query)
        assert found is not None
        assert found[2] in known.labels_of(found[1])


@every_board
def test_panels_have_ids_places_units_and_no_data_source_of_their_own(board: Board) -> None:
    panels = written(board)["panels"]

    ids = [one["id"] for one in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for one in panels:
        place = one["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= COLUMNS
        assert not cells & taken
        taken |= cells
    for one in in_grafana(board):
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert one["fieldConfig"]["defaults"]["unit"]
        assert one["description"].endswith(".")


@every_board
def test_a_panel_of_the_file_is_the_panel_of_the_code(board: Board) -> None:
    shown = in_grafana(board)

    assert [one["title"] for one in shown] == [one.title for one in board.panels]
    for one, panel in zip(shown, board.panels, strict=True):
        assert [target["expr"] for target in one["targets"]] == [
            query.expr for query in panel.queries
        ]
        references = [target["refId"] for target in one["targets"]]
        assert all(first < second for first, second in pairwise(references))
        assert ("Needs a GPU." in one["description"]) == (panel.needs is Needs.GPU)
        if panel.kind is Kind.TABLE:
            assert len(panel.columns) == len(panel.queries)


def test_every_metric_is_asked_for_or_named_here() -> None:
    known = queries(WINDOWS)
    asked = [one.expr for one in rules_of(WINDOWS)] + [one.expr for one in alerts_of(WINDOWS)]
    asked += [query.expr for one in BOARDS for panel in one.panels for query in panel.queries]
    names = {name for expr in asked for name in known.names_in(_plain(expr))}

    not_asked = {
        one.name for one in CATALOGUE if not any(name.startswith(one.name) for name in names)
    }
    assert not_asked == NOT_ASKED


@needs_helm
def test_chart_brings_each_dashboard_where_the_sidecar_of_grafana_looks() -> None:
    on = {"create": True, "namespace": "grafana", "annotations": {"grafana_folder": "Training"}}

    made = of_kind(rendered(monitoring={"dashboards": on}), "ConfigMap")

    for one in made:
        assert one["metadata"]["namespace"] == "grafana"
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "Training"}
    data = {file: json.loads(text) for one in made for file, text in one["data"].items()}
    assert data == {f"finetune-{one.name}.json": written(one) for one in BOARDS}
    assert of_kind(rendered(), "ConfigMap") == []

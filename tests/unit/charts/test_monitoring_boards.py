"""The chart's dashboards: known metrics and labels, and JSON that a Grafana can place and draw."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from finetune_trainer.config.metrics import Needs
from finetune_trainer.telemetry.node.slow import SlowPace
from monitoring.board import Board, Kind, Limit, Panel
from monitoring.boards import boards
from monitoring.generate import FILES
from monitoring.grafana import COLUMNS
from monitoring.groups import alerts_of, rules_of
from monitoring.known import CATALOGUE, OF_DCGM, queries
from monitoring.rule import Severity
from monitoring.windows import Windows
from support.charts.grafana_schema import schema_problems
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
    "finetune_job_gpu_seconds",
    "finetune_job_info",
    "finetune_job_last_recovery_seconds",
    "finetune_operator_backlog_jobs",
    "finetune_operator_build_info",
    "finetune_train_alloc_retries_total",
    "finetune_train_checkpoint_last_step",
    "finetune_train_epoch_ratio",
    "finetune_train_ooms_total",
    "finetune_train_samples_total",
}

ROOT = Path(__file__).parents[3]
WINDOWS = Windows()
BOARDS = boards(WINDOWS)
KNOWN = queries(WINDOWS)
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
    """Return the panels of the file, including those inside collapsed rows."""
    found: list[dict[str, Any]] = []
    for one in written(board)["panels"]:
        found += one["panels"] if one["type"] == "row" else [one]
    return found


@every_panel
def test_a_panel_asks_for_what_there_is_and_calls_its_series_by_labels_they_have(
    board: Board, panel: Panel
) -> None:
    for query in panel.queries:
        labels = KNOWN.labels_of(query.expr.replace("$__rate_interval", "5m"))

        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= labels
        variables = set(re.findall(r"\$(\w+)", query.expr)) - {"__rate_interval"}
        assert variables <= {one.name for one in board.variables}
        if panel.kind not in (Kind.TABLE, Kind.HEATMAP, Kind.NUMBER):
            assert query.legend


@every_panel
def test_a_panel_says_whether_it_needs_a_gpu(board: Board, panel: Panel) -> None:
    needs = {one.name: one.needs for one in (*CATALOGUE, *OF_DCGM)}
    asked = {name for one in panel.queries for name in KNOWN.names_in(_plain(one.expr))}

    if any(needs.get(name) is Needs.GPU or "gpu" in name for name in asked):
        assert panel.needs is Needs.GPU or len(panel.queries) > 1


def _plain(expr: str) -> str:
    return expr.replace("$__rate_interval", "5m")


@every_board
def test_a_variable_asks_for_what_there_is(board: Board) -> None:
    for variable in board.variables:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.query)
        assert found is not None
        assert found[2] in KNOWN.labels_of(found[1])


@every_board
def test_a_dashboard_matches_the_schema_of_grafana(board: Board) -> None:
    assert schema_problems(written(board)) == []


def test_the_schema_check_finds_unknown_fields_and_wrong_types() -> None:
    board = written(BOARDS[0])
    board["panels"][1]["gridPos"]["w"] = "wide"
    board["panels"][1]["colour"] = "red"
    board["templating"]["list"][0]["type"] = "list"

    unknown, width, variable = schema_problems(board)

    assert unknown == "dashboard.panels[1].colour: not a field"
    assert width.startswith("dashboard.panels[1].grid_pos.w: 'wide'")
    assert variable.startswith("dashboard.templating.list_val[0].type_val: 'list'")


def cells_of(place: dict[str, int]) -> set[tuple[int, int]]:
    return {
        (x, y)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    }


@every_board
def test_panels_have_ids_places_units_and_no_data_source_of_their_own(board: Board) -> None:
    shown, panels = written(board)["panels"], in_grafana(board)

    ids = [one["id"] for one in [*panels, *(one for one in shown if one["type"] == "row")]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for one in shown:  # all panels of collapsed rows are below their row, where others follow
        inside = one.get("panels", [])
        for group in ([one], inside):
            for member in group:
                place = member["gridPos"]
                assert place["x"] + place["w"] <= COLUMNS
                assert place["y"] > one["gridPos"]["y"] or member is one
        assert not cells_of(one["gridPos"]) & taken
        taken |= cells_of(one["gridPos"])
        cells = [cell for member in inside for cell in cells_of(member["gridPos"])]
        assert len(set(cells)) == len(cells)
    for one in panels:
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert one["fieldConfig"]["defaults"]["unit"]
        assert one["description"].endswith(".")


@every_board
def test_a_row_is_collapsed_where_a_run_on_cpus_leaves_it_empty(board: Board) -> None:
    for row in board.rows:
        needs = {panel.needs for panel in row.panels}
        if needs == {Needs.GPU}:
            assert row.is_collapsed
        else:
            assert Needs.GPU not in needs
    shown = {one["title"]: one for one in written(board)["panels"] if one["type"] == "row"}
    assert {title: one["collapsed"] for title, one in shown.items()} == {
        one.title: one.is_collapsed for one in board.rows
    }
    for one in board.rows:
        inside = [panel["title"] for panel in shown[one.title]["panels"]]
        assert inside == [panel.title for panel in one.panels] * one.is_collapsed


@every_board
def test_titles_of_a_dashboard_differ(board: Board) -> None:
    titles = [one.title for one in board.panels]

    assert len(set(titles)) == len(titles)


def test_the_runbook_calls_panels_by_their_titles() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    titles = {panel.title for board in BOARDS for panel in board.panels}
    titles |= {row.title for board in BOARDS for row in board.rows}
    titles.add("Status, Targets")  # a page of Prometheus

    named = re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", page)

    assert named
    assert [one for one in named if one not in titles] == []


every_limit = pytest.mark.parametrize(
    ("board", "panel", "limit"),
    [
        pytest.param(board, panel, limit, id=f"{board.name}: {panel.title}")
        for board in BOARDS
        for panel in board.panels
        for limit in panel.limits
    ],
)


@every_limit
def test_a_limit_equals_that_of_its_alert_and_has_the_colour_of_its_severity(
    board: Board, panel: Panel, limit: Limit
) -> None:
    (alert,) = (one for one in alerts_of(WINDOWS) if one.name == limit.alert)
    numbers = {float(one) for one in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", alert.expr)}
    if limit.alert == "FineTuneRankSlow":  # ranks are compared by their nodes, not by a query
        numbers = {SlowPace().slow}
    (shown,) = (one for one in in_grafana(board) if one["title"] == panel.title)

    least = {limit.value, round(1 - limit.value, 9)} if limit.is_minimum else {limit.value}
    assert least & numbers
    color = {Severity.WARNING: "orange", Severity.CRITICAL: "red"}[alert.severity]
    colors = [color, "green"] if limit.is_minimum else ["green", color]
    assert [
        {"color": one, "value": value}
        for one, value in zip(colors, (None, limit.value), strict=True)
    ] in steps_in(shown)


def steps_in(panel: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the thresholds of a panel and of its columns."""
    config = panel["fieldConfig"]
    found = [config["defaults"]["thresholds"]]
    for override in config["overrides"]:
        found += [one["value"] for one in override["properties"] if one["id"] == "thresholds"]
    return [one["steps"] for one in found]


@every_panel
def test_a_panel_without_a_limit_is_not_red_from_a_default(board: Board, panel: Panel) -> None:
    (shown,) = (one for one in in_grafana(board) if one["title"] == panel.title)

    if panel.limit is None:
        assert steps_in(shown)[0] == [{"color": "text", "value": None}]


def links_in(panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the URLs of a panel's links, each with the column that it is in."""
    config = panel["fieldConfig"]
    found = [("", one["url"]) for one in config["defaults"].get("links", [])]
    for override in config["overrides"]:
        column = override["matcher"]["options"]
        for one in override["properties"]:
            if one["id"] == "links":
                found += [(column, link["url"]) for link in one["value"]]
    return found


@every_panel
def test_a_link_gives_its_dashboard_a_label_of_the_series_for_each_variable(
    board: Board, panel: Panel
) -> None:
    labels = [KNOWN.labels_of(_plain(one.expr)) for one in panel.queries]
    variables = {f"finetune-{one.name}": {each.name for each in one.variables} for one in BOARDS}
    (shown,) = (one for one in in_grafana(board) if one["title"] == panel.title)
    found = links_in(shown)

    assert len(found) == len(panel.links)
    for column, url in found:
        parts = urlsplit(url)
        chosen = parse_qs(parts.query.replace("${datasource:queryparam}&", "", 1))
        assert chosen.keys() == {f"var-{one}" for one in variables[parts.path[len("/d/") :]]}
        place = r"\$\{__data\.fields\.(\w+)\}" if column else r"\$\{__field\.labels\.(\w+)\}"
        for name, (value, *_) in chosen.items():
            label = re.match(place, value)
            assert label is not None
            assert f"var-{label[1]}" == name
            assert all(label[1] in one for one in labels)
        assert url.endswith("&${__url_time_range}")
        assert (panel.kind is Kind.TABLE) == (column in labels[0])


def test_all_dashboards_are_reached_from_the_table_of_jobs() -> None:
    reached = {"finetune-fleet"}
    for _ in BOARDS:
        for board in BOARDS:
            if f"finetune-{board.name}" in reached:
                urls = [url for one in in_grafana(board) for _, url in links_in(one)]
                reached |= {urlsplit(one).path[len("/d/") :] for one in urls}

    (jobs,) = (one for one in in_grafana(BOARDS[0]) if one["title"] == "Jobs")
    assert [column for column, _ in links_in(jobs)] == ["finetunejob"]
    assert reached == {written(one)["uid"] for one in BOARDS}


@every_board
def test_a_column_of_a_table_has_the_unit_of_its_values(board: Board) -> None:
    for panel, shown in zip(board.panels, in_grafana(board), strict=True):
        if panel.kind is not Kind.TABLE:
            continue
        units = {
            override["matcher"]["options"]: one["value"]
            for override in shown["fieldConfig"]["overrides"]
            for one in override["properties"]
            if one["id"] == "unit"
        }
        assert units == {one.name: one.unit for one in panel.columns if one.name}
        organised = shown["transformations"][-1]["options"]
        headings = set(organised["renameByName"].values())
        assert headings == units.keys()
        hidden = organised["excludeByName"].keys() - {"Time"}
        assert len(hidden) + len(headings) == len(panel.queries)


def test_the_table_of_jobs_has_loss_time_left_and_restarts() -> None:
    (jobs,) = (one for one in BOARDS[0].panels if one.title == "Jobs")

    units = {one.name: one.unit for one in jobs.columns}
    assert units.keys() >= {"loss", "time left", "restarts"}
    assert units["time left"] == "s"


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
    asked = [one.expr for one in rules_of(WINDOWS)] + [one.expr for one in alerts_of(WINDOWS)]
    asked += [query.expr for one in BOARDS for panel in one.panels for query in panel.queries]
    names = {name for expr in asked for name in KNOWN.names_in(_plain(expr))}

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

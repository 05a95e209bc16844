"""What kstatus, Flux and Argo CD make of each recorded status: docs/how-to/gitops.md says it."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.kube.resources import Object
from finetune_operator.reconcile.conditions import Situation, Stage, describe
from support.api.verdicts import (
    argo,
    flux_by,
    has_program,
    health_expressions,
    health_script,
    kstatus,
    program,
)
from support.reconcile.recorded_statuses import FILE, MOMENTS, Moment

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "gitops.md"
RECORDED: dict[str, Object] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
EVERY_JOB = pytest.mark.parametrize("what", RECORDED)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def table() -> dict[str, list[str]]:
    """Return the page's verdicts by what it says of the job."""
    _, part = PAGE.read_text(encoding="utf-8").split("\n## What each tool says of a job\n")
    rows = re.findall(r"^\|(.+)\|$", part.split("\n## ")[0], re.MULTILINE)[2:]
    cells = [[cell.strip(" `") for cell in row.split("|")] for row in rows]
    return {name: said for name, *said in cells}


def test_page_has_a_row_for_each_recorded_job() -> None:
    assert list(table()) == list(RECORDED) == [one.what for one in MOMENTS]


@EVERY_JOB
def test_verdicts_are_those_of_the_page(what: str) -> None:
    made = RECORDED[what]
    verdicts = (
        kstatus(made),
        flux_by(health_expressions(), made),
        argo(health_script(), made),
    )

    assert [*verdicts] == table()[what]


@pytest.mark.skipif(not has_program("kstatus"), reason="kstatus is not on the PATH")
@EVERY_JOB
def test_kstatus_itself_agrees(what: str) -> None:
    assert program(["kstatus"], RECORDED[what]) == kstatus(RECORDED[what])


@pytest.mark.skipif(not has_program("argo-health"), reason="argo-health is not on the PATH")
@EVERY_JOB
def test_argo_cds_own_lua_agrees(what: str, tmp_path: Path) -> None:
    (file := tmp_path / "health.lua").write_text(health_script())

    said = program(["argo-health", str(file)], RECORDED[what])

    assert said == argo(health_script(), RECORDED[what])


def test_every_stage_is_recorded() -> None:
    assert {one.stage for one in MOMENTS} == {*Stage, None}


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda one: one.what)
def test_a_recorded_job_is_in_the_stage_that_it_stands_for(moment: Moment) -> None:
    if moment.stage is None:
        return  # told by the CRD's default, or before the spec changed
    situation = Situation(moment.stage, moment.reason, "a sentence")
    told = describe(FineTuneJobStatus(), situation, NOW, 1).conditions
    recorded = RECORDED[moment.what]["status"]["conditions"]
    says = {one["type"]: one["status"] for one in recorded}
    by_obstacle = {"Stalled", "Admitted"}

    assert says.items() >= {(one.type, one.status) for one in told if one.type not in by_obstacle}


def test_a_job_without_status_is_in_progress_to_argo_cd() -> None:
    made = {"metadata": {"generation": 1}, "spec": {}}

    assert argo(health_script(), made) == "Progressing"


def test_health_script_gives_the_operators_own_sentence() -> None:
    from lupa import lua51

    lua = lua51.LuaRuntime()
    lua.globals().obj = lua.table_from(RECORDED["profile missing"], recursive=True)

    assert "FineTuneProfile" in lua.execute(health_script()).message

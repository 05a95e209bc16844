"""docs/status.md tells every phase, condition, reason, Event and column there is, and no other."""

import ast
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from finetune_operator.api.crd import COLUMNS
from finetune_operator.api.v1alpha1.status import (
    FIRST_CONDITIONS,
    AttemptStatus,
    Condition,
    FineTuneJobStatus,
    JobPhase,
)
from finetune_operator.backends.azureml.states import STATES
from finetune_operator.backends.base import Effect, Obstacle
from finetune_operator.backends.kubernetes.reasons import KubernetesReason
from finetune_operator.kernel import events
from finetune_operator.kernel.events import events_between
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    Situation,
    Stage,
    describe,
    find,
)
from finetune_trainer.config import FailureClass

PAGE = Path(__file__).parents[3] / "docs" / "status.md"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
BEFORE = FineTuneJobStatus()


def tables(section: str) -> list[list[list[str]]]:
    """Return the cells of the tables below a heading, without their first lines."""
    _, *parts = re.split(r"^## (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = dict(zip(parts[::2], parts[1::2], strict=True))[section]
    found = re.findall(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.splitlines()]
        for rows in found
    ]


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", cell)


def named(rows: list[list[str]]) -> list[str]:
    return [name for row in rows for name in names(row[0])]


def claims() -> dict[str, set[tuple[str, str]]]:
    """Return by reason the conditions that the page says to give it, and their status."""
    reasons, *_ = tables("Reasons")
    return {
        names(row[0])[0]: set(re.findall(r"`(\w+)` (True|False|Unknown)", row[1]))
        for row in reasons
    }


def test_columns() -> None:
    (rows,) = tables("Columns")
    assert [(names(row[0]), row[1] == "yes") for row in rows] == [
        ([one["name"]], "priority" in one) for one in COLUMNS
    ]


def test_phases() -> None:
    (rows,) = tables("Phases")
    assert named(rows) == [one.value for one in JobPhase]


def test_conditions_and_which_of_them_are_never_false() -> None:
    (rows,) = tables("Conditions")
    assert named(rows) == [one.value for one in ConditionType]
    told = [describe(BEFORE, Situation(stage, "Because", ""), NOW, 1) for stage in Stage]
    false = {one.type for status in told for one in status.conditions if one.status == "False"}
    says = {names(row[0])[0]: row[2] != "never" for row in rows}
    # Admitted is False by a reason, not by a stage.
    assert {name for name, is_said in says.items() if is_said} == {*false, "Admitted"}


def test_reasons() -> None:
    reasons, of_kubernetes, _, classes = tables("Reasons")
    assert named(reasons) == [FIRST_CONDITIONS[0].reason, *(one.value for one in Reason)]
    assert named(of_kubernetes) == [one.value for one in KubernetesReason]
    assert named(classes) == [one.value for one in FailureClass]


def test_reasons_of_azureml_and_when_they_are_stalled() -> None:
    _, _, rows, _ = tables("Reasons")
    limits = {row.obstacle.reason: row.limit for row in STATES.values() if row.obstacle}
    unlisted = {"NotStopped", "UnknownState", "ServiceSilent", "NotSeen"}
    assert sorted(named(rows)) == sorted(limits.keys() | unlisted)
    for row in rows:
        for name in names(row[0]):
            number, _, unit = row[2].partition(" ")
            if name in limits:
                seconds = float(number) * {"minute": 60.0, "hour": 3600.0}[unit.rstrip("s")]
                assert seconds == limits[name]


@pytest.mark.parametrize("reason", Reason)
def test_conditions_can_be_what_a_reason_is_told_with(reason: Reason) -> None:
    if reason in (Reason.COMMITTED, Reason.RESUMED):
        return  # told of a checkpoint, and of a job that was suspended before
    waits = Obstacle(reason, "", Effect.QUEUED) if reason is Reason.QUEUED else None
    situations = (Situation(stage, reason, "", obstacle=waits) for stage in Stage)
    told = [describe(BEFORE, one, NOW, 1) for one in situations]
    assert claims()[reason]
    for kind, status in claims()[reason]:
        found = [find(one, ConditionType(kind)) for one in told]
        assert [one for one in found if one and (one.status, one.reason) == (status, reason)]


def literal_events() -> set[tuple[str, str]]:
    """Return type and reason of the Events whose reason is written down where they are made."""
    made = set()
    for path in Path(events.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "JobEvent":
                kind, reason, _ = node.args
                constants = [one for one in ast.walk(reason) if isinstance(one, ast.Constant)]
                made |= {(ast.unparse(kind), str(one.value)) for one in constants}
    return {(kind.rpartition(".")[2].capitalize(), reason) for kind, reason in made}


def told(after: FineTuneJobStatus) -> set[tuple[str, str]]:
    return {(one.type.value, one.reason) for one in events_between(BEFORE, after)}


def test_events() -> None:
    conditions = {
        pair
        for reason, kinds in claims().items()
        for kind, status in kinds
        for one in [Condition(type=kind, status=status, reason=reason)]
        for pair in told(FineTuneJobStatus(conditions=[one]))
    }
    ends = {
        pair
        for one in set(FailureClass) - {FailureClass.COMPLETED}
        for attempt in [AttemptStatus(number=1, end_time="then", failure_class=one)]
        for pair in told(FineTuneJobStatus(attempts=[attempt]))
    }
    (rows,) = tables("Events")
    said = {(row[1], name) for row in rows for name in names(row[0])}
    assert said == literal_events() | conditions | ends

"""The pages of the status list every phase, condition, reason, Event and column, and no other."""

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

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "status.md", DOCS / "reference" / "reasons.md")
FORECASTS = frozenset({"Fits", "Tight", "DoesNotFit", "ModelUnknown", "CapacityUnknown"})
"""Reasons of Planned; tests/unit/kernel/test_planned.py causes them."""
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
BEFORE = FineTuneJobStatus()


def rows(section: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its first lines.

    Raises:
        ValueError: the heading is on no page, or on both.
    """
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    _, *parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    (body,) = [
        body for title, body in zip(parts[::2], parts[1::2], strict=True) if title == section
    ]
    found = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", body, re.MULTILINE)
    assert found, section
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", cell)


def named(section: str) -> list[str]:
    return [name for row in rows(section) for name in names(row[0])]


def claims() -> dict[str, set[tuple[str, str]]]:
    """Return by reason the conditions that the page says to give it, and their status."""
    return {
        names(row[0])[0]: set(re.findall(r"`(\w+)` (True|False|Unknown)", row[1]))
        for row in rows("Reasons of conditions")
    }


def test_columns() -> None:
    assert [(names(row[0]), row[1] == "yes") for row in rows("Columns")] == [
        ([one["name"]], "priority" in one) for one in COLUMNS
    ]


def test_phases() -> None:
    assert named("Phases") == [one.value for one in JobPhase]


def test_conditions_and_which_of_them_are_never_false() -> None:
    assert named("Conditions") == [one.value for one in ConditionType]
    told = [describe(BEFORE, Situation(stage, "Because", ""), NOW, 1) for stage in Stage]
    false = {one.type for status in told for one in status.conditions if one.status == "False"}
    says = {names(row[0])[0]: row[2] != "never" for row in rows("Conditions")}
    # Admitted and Planned are False by a reason, not by a stage.
    assert {name for name, is_said in says.items() if is_said} == {*false, "Admitted", "Planned"}


def test_reasons() -> None:
    first = FIRST_CONDITIONS[0].reason
    assert named("Reasons of conditions") == [first, *(one.value for one in Reason)]
    kubernetes = named("Pods of the backend kubernetes")
    assert kubernetes == [one.value for one in KubernetesReason]
    assert named("Why an attempt ended") == [one.value for one in FailureClass]


def test_reasons_of_azureml_and_when_they_are_stalled() -> None:
    section = "Jobs of the backend azureml"
    limits = {row.obstacle.reason: row.limit for row in STATES.values() if row.obstacle}
    unlisted = {"NotStopped", "UnknownState", "ServiceSilent", "NotSeen"}
    assert sorted(named(section)) == sorted(limits.keys() | unlisted)
    for row in rows(section):
        for name in names(row[0]):
            number, _, unit = row[2].partition(" ")
            if name in limits:
                seconds = float(number) * {"minute": 60.0, "hour": 3600.0}[unit.rstrip("s")]
                assert seconds == limits[name]


@pytest.mark.parametrize("reason", Reason)
def test_conditions_can_be_what_a_reason_is_told_with(reason: Reason) -> None:
    if reason in (Reason.COMMITTED, Reason.RESUMED) or reason in FORECASTS:
        return  # of a checkpoint, of a job that was suspended before, or of a forecast
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
    said = {(row[1], name) for row in rows("Events") for name in names(row[0])}
    assert said == literal_events() | conditions | ends

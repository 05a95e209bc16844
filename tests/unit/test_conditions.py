"""Conditions keep their times while they say the same, and each stage says what kstatus expects."""

from datetime import UTC, datetime, timedelta

import pytest

from finetune_operator.api.v1alpha1.status import Condition, FineTuneJobStatus
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Situation,
    Stage,
    describe,
    find,
    is_true,
    parse_rfc3339,
    rfc3339,
    set_condition,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LATER = NOW + timedelta(minutes=1)


def ready(status: str, message: str = "") -> Condition:
    return Condition(type="Ready", status=status, reason="Because", message=message)


def test_transition_time_changes_only_with_the_status() -> None:
    (first,) = set_condition([], ready("False"), NOW)
    (same,) = set_condition([first], ready("False", "other words"), LATER)
    (changed,) = set_condition([same], ready("True"), LATER)
    assert first.last_transition_time == same.last_transition_time == "2026-01-02T03:04:05Z"
    assert same.message == "other words"
    assert changed.last_transition_time == "2026-01-02T03:05:05Z"


def test_a_condition_is_replaced_in_its_place() -> None:
    other = Condition(type="Other", status="True", reason="Because")
    conditions = set_condition([ready("False"), other], ready("True"), NOW)
    assert [(found.type, found.status) for found in conditions] == [
        ("Ready", "True"),
        ("Other", "True"),
    ]


def test_times_are_written_in_utc_and_read_back() -> None:
    assert parse_rfc3339(rfc3339(NOW)) == NOW


@pytest.mark.parametrize("stage", list(Stage))
def test_describing_the_same_situation_later_changes_nothing(stage: Stage) -> None:
    situation = Situation(stage, "Because", "a sentence")
    once = describe(FineTuneJobStatus(), situation, NOW, 3)
    assert describe(once, situation, LATER, 3) == once
    assert once.observed_generation == 3


@pytest.mark.parametrize(
    ("stage", "ready", "reconciling", "stalled"),
    [
        (Stage.STARTING, False, True, False),
        (Stage.RUNNING, True, False, False),
        (Stage.RESTARTING, False, True, False),
        (Stage.SUSPENDING, False, True, False),
        (Stage.ENDING, False, True, False),
        (Stage.SUSPENDED, False, False, False),
        (Stage.COMPLETE, True, False, False),
        (Stage.FAILED, False, False, True),
        (Stage.REFUSED, False, False, True),
        (Stage.BLOCKED, False, False, True),
        (Stage.HELD, False, False, True),
    ],
)
def test_every_stage_tells_kstatus_where_it_is(
    stage: Stage, ready: bool, reconciling: bool, stalled: bool
) -> None:
    status = describe(FineTuneJobStatus(), Situation(stage, "Because", "a sentence"), NOW, 1)
    assert is_true(status, ConditionType.READY) is ready
    assert is_true(status, ConditionType.RECONCILING) is reconciling
    assert is_true(status, ConditionType.STALLED) is stalled


def test_admitted_follows_the_queue() -> None:
    status, told = FineTuneJobStatus(), []
    for reason in ("Provisioning", "Queued", "Unschedulable", "Queued", "Training"):
        stage = Stage.RUNNING if reason == "Training" else Stage.STARTING
        status = describe(status, Situation(stage, reason, reason.lower()), NOW, 1)
        found = find(status, ConditionType.ADMITTED)
        assert found is not None
        told.append((found.status, found.reason, found.message))
    assert told == [
        ("True", "Admitted", "there is no queue to wait for"),
        ("False", "Queued", "queued"),
        ("True", "Admitted", "the queue let it go"),
        ("False", "Queued", "queued"),
        ("True", "Admitted", "the queue let it go"),
    ]

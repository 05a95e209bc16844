"""Conditions keep their times while they say the same, and each stage says what kstatus expects."""

from datetime import UTC, datetime, timedelta

import pytest

from finetune_operator.api.v1alpha1.status import (
    FIRST_CONDITIONS,
    Condition,
    FineTuneJobStatus,
)
from finetune_operator.backends.base import Effect, Obstacle
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


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("time", [None, "1970-01-01T00:00:00Z"], ids=["now", "0.1.0"])
def test_a_described_job_has_no_time_of_the_default_conditions(
    stage: Stage, time: str | None
) -> None:
    first = [one.model_copy(update={"last_transition_time": time}) for one in FIRST_CONDITIONS]
    new = describe(FineTuneJobStatus(conditions=first), Situation(stage, "Because", "x"), NOW, 1)
    assert {one.last_transition_time for one in new.conditions} == {rfc3339(NOW)}
    (again,) = set_condition(first[1:], first[1].model_copy(update={"message": "new"}), NOW)
    assert again.last_transition_time == rfc3339(NOW)


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
        (Stage.SUSPENDED, True, False, False),
        (Stage.RESUMING, False, True, False),
        (Stage.COMPLETE, True, False, False),
        (Stage.FAILED, False, False, True),
        (Stage.REFUSED, False, False, True),
        (Stage.BLOCKED, False, False, True),
        (Stage.OVERRULED, False, True, False),
        (Stage.ABANDONED, False, False, True),
        (Stage.HELD, False, False, True),
        (Stage.DELETING, False, True, False),
        (Stage.DELETED, False, True, False),
    ],
)
def test_every_stage_tells_kstatus_where_it_is(
    stage: Stage, ready: bool, reconciling: bool, stalled: bool
) -> None:
    status = describe(FineTuneJobStatus(), Situation(stage, "Because", "a sentence"), NOW, 1)
    assert is_true(status, ConditionType.READY) is ready
    assert is_true(status, ConditionType.RECONCILING) is reconciling
    assert is_true(status, ConditionType.STALLED) is stalled


def test_reconciling_keeps_its_place_before_stalled_as_kstatus_takes_the_first() -> None:
    stuck = Obstacle("CreationFailed", "the quota allows no more", Effect.STALLED)
    situation = Situation(Stage.SUSPENDING, "Suspending", "it stops", obstacle=stuck)
    status = describe(FineTuneJobStatus(conditions=list(FIRST_CONDITIONS)), situation, NOW, 1)
    true = [one.type for one in status.conditions if one.status == "True"]
    assert [one for one in true if one in ("Reconciling", "Stalled")] == ["Reconciling", "Stalled"]


def admissions(told: list[tuple[Stage, str, bool]], *, has_queue: bool) -> list[tuple[str, str]]:
    """Return status and message of Admitted after each of these: stage, reason, exists."""
    status, found = FineTuneJobStatus(), []
    for stage, reason, exists in told:
        obstacle = Obstacle(reason, "", Effect.QUEUED) if reason == "Queued" else None
        situation = Situation(stage, reason, reason.lower(), exists=exists, obstacle=obstacle)
        status = describe(status, situation, NOW, 1, has_queue=has_queue)
        one = find(status, ConditionType.ADMITTED)
        found.append((one.status, one.message) if one else ("", ""))
    return found


QUEUED = (Stage.STARTING, "Queued", True)
BLOCKED = (Stage.BLOCKED, "CreationFailed", False)
OPENED = (Stage.STARTING, "Provisioning", False)
HAS_NO_NODE = (Stage.STARTING, "Unschedulable", True)
TRAINS = (Stage.RUNNING, "Training", True)
NO_QUEUE = ("True", "no queue holds the job")
LET_GO = ("True", "the queue has admitted the job")
WAITS = ("False", "queued")


def test_admitted_follows_the_queue() -> None:
    life = [OPENED, QUEUED, HAS_NO_NODE, QUEUED, TRAINS]
    assert admissions(life, has_queue=True) == [("", ""), WAITS, LET_GO, WAITS, LET_GO]


def test_a_queue_has_let_nothing_go_that_could_not_be_created() -> None:
    life = [OPENED, BLOCKED, OPENED, TRAINS]
    failed = ("False", "creationfailed")
    assert admissions(life, has_queue=True) == [("", ""), failed, failed, LET_GO]


def test_a_job_that_goes_on_waits_in_its_queue_until_it_is_seen_to_be_let_go() -> None:
    life = [QUEUED, (Stage.SUSPENDED, "SuspendedByUser", False), OPENED, HAS_NO_NODE]
    assert admissions(life, has_queue=True) == [WAITS, WAITS, WAITS, LET_GO]


def test_a_job_without_a_queue_waits_for_none_unless_the_cluster_queues_it() -> None:
    life = [OPENED, BLOCKED, HAS_NO_NODE, QUEUED, TRAINS]
    told = [NO_QUEUE, NO_QUEUE, NO_QUEUE, WAITS, LET_GO]
    assert admissions(life, has_queue=False) == told


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.RESTARTING])
def test_an_attempt_in_a_queue_is_queued_and_starts_when_it_is_let_go(stage: Stage) -> None:
    status, phases = FineTuneJobStatus(), []
    for reason in ("Provisioning", "Queued", "Unschedulable"):
        obstacle = Obstacle(reason, "", Effect.QUEUED) if reason == "Queued" else None
        situation = Situation(stage, reason, "a sentence", exists=True, obstacle=obstacle)
        status = describe(status, situation, NOW, 1)
        phases.append(status.phase.value)
    assert phases == [stage.value, "Queued", stage.value]

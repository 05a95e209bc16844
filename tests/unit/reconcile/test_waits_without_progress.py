"""Attempts in a row without progress wait longer each time, whatever their class or rule."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.reconcile.decide import Submit
from finetune_trainer.config import CheckpointRef, ExitCode, FailureClass, Termination
from support.kernel.fake_backend import PREEMPTED, ended
from support.reconcile.decisions import Life, running

KILLED = ended(137, FailureClass.WORKER_LOST, "node 0 was killed")
FREE = {"maxRestarts": 0, "rules": [{"onClass": "WorkerLost", "action": "RestartFree"}]}
COUNTED = {"maxRestarts": 1000}
SERVICE = Observation(
    AttemptPhase.FAILED, all_gone=True, failure_class=FailureClass.SERVICE_FAILED, message="no"
)
Reports = Callable[[int], list[Observation]]


def silent(number: int) -> list[Observation]:
    return []


def good_steps_once(number: int) -> list[Observation]:
    return [trained(number, 500)] if number == 1 else []


def good_steps_each_time(number: int) -> list[Observation]:
    return [trained(number, 500)]


def loading_what_the_first_saved(number: int) -> list[Observation]:
    return [trained(1, 500, saved=500) if number == 1 else trained(number, 500, resumed=500)]


def report_of_the_first(number: int) -> list[Observation]:
    return [trained(1, 500)]


def trained(
    number: int, step: int, saved: int | None = None, resumed: int | None = None
) -> Observation:
    """Return the observation of an attempt that reports these steps."""
    ref = None
    if saved is not None:
        ref = CheckpointRef(step=saved, path=f"/c/step-{saved}", time=0.0, world_size=1)
    return running(step, attempt=number, checkpoint=ref, resumed_step=resumed)


def waits(life: Life, end: Observation, reports: Reports, count: int) -> list[float]:
    """Return the waits after so many attempts, each of which takes no time."""
    found = []
    for _ in range(count):
        for report in reports(life.status.attempt):
            life.see(report)
        ended_at = life.now
        assert life.end(end) == (Submit(life.status.attempt),)
        found.append((life.now - ended_at).total_seconds())
    return found


def begun(**overrides: Any) -> Life:
    life = Life(**overrides)
    life.see()
    return life


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param(silent, id="without a report"),
        pytest.param(good_steps_once, id="after 500 good steps"),
        pytest.param(good_steps_each_time, id="after 500 good steps each time"),
        pytest.param(loading_what_the_first_saved, id="after 500 saved steps"),
        pytest.param(report_of_the_first, id="with the report of another attempt"),
    ],
)
@pytest.mark.parametrize(
    ("policy", "end"),
    [
        pytest.param(COUNTED, KILLED, id="counted"),
        pytest.param(FREE, KILLED, id="free by a rule"),
        pytest.param({}, PREEMPTED, id="free by its class"),
        pytest.param({}, SERVICE, id="service"),
        pytest.param({**FREE, "backoff": {"baseSeconds": 1, "maxSeconds": 1}}, KILLED, id="short"),
    ],
)
def test_attempts_that_always_fail_are_at_most_twenty_in_an_hour(
    policy: dict[str, Any], end: Observation, reports: Reports
) -> None:
    life = begun(restart_policy=policy)
    hour, attempts = life.now + timedelta(hours=1), 0
    while life.now < hour and attempts <= 20:
        waits(life, end, reports, 1)
        attempts += 1
    assert 10 < attempts <= 20


def test_the_wait_doubles_from_ten_seconds_to_five_minutes() -> None:
    life = begun(restart_policy=FREE)
    assert waits(life, KILLED, silent, 9) == [0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_the_status_names_the_cause_of_a_wait() -> None:
    life = begun(restart_policy=FREE)
    life.see(KILLED)
    life.see(KILLED)
    assert life.said("Ready") == (
        "attempt 3 starts at 2026-01-01T00:00:10Z, after 2 attempts in a row without progress"
    )
    assert life.condition("Ready") == ("False", "Restarting")


@pytest.mark.parametrize("policy", [COUNTED, FREE], ids=["counted", "free"])
def test_an_attempt_with_progress_is_followed_at_once(policy: dict[str, Any]) -> None:
    life = begun(restart_policy=policy)
    waits(life, KILLED, silent, 3)
    assert waits(life, KILLED, lambda number: [trained(number, 1)], 1) == [0]
    assert waits(life, KILLED, lambda number: [trained(number, 1, saved=1)], 1) == [0]
    assert waits(life, KILLED, lambda number: [trained(number, 1, resumed=1)], 2) == [0, 10]
    assert waits(life, KILLED, lambda number: [trained(number, 2, resumed=1)], 1) == [0]


def test_a_checkpoint_that_a_later_attempt_starts_from_is_progress() -> None:
    """The operator may have read no report of the attempt that saved it."""
    life = begun(restart_policy=FREE)
    assert waits(life, KILLED, silent, 3) == [0, 10, 20]
    assert waits(life, KILLED, lambda number: [trained(number, 100, resumed=100)], 1) == [0]


def test_a_longer_backoff_of_the_user_holds() -> None:
    policy = {"maxRestarts": 9, "backoff": {"baseSeconds": 15, "maxSeconds": 30}}
    life = begun(restart_policy=policy)
    assert waits(life, KILLED, silent, 5) == [15, 30, 30, 40, 80]


def test_a_resumed_job_starts_at_once_and_its_row_begins_again() -> None:
    life = begun(restart_policy=COUNTED)
    waits(life, KILLED, silent, 4)
    life.see(KILLED)
    assert life.requeue == 80
    life.suspend(True)
    life.see()
    life.wait(1)
    life.suspend(False)
    assert life.see() == (Submit(6),)
    assert waits(life, KILLED, silent, 3) == [0, 10, 20]


def test_a_job_that_is_resumed_while_it_stops_starts_at_once() -> None:
    life = begun(restart_policy={"maxRestarts": 9, "backoff": {"baseSeconds": 60}})
    waits(life, KILLED, silent, 2)
    life.suspend(True)
    life.see(running(0, attempt=3))
    life.suspend(False)
    assert life.see(PREEMPTED) == (Submit(4),)


def test_a_deadline_ends_the_wait() -> None:
    life = begun(restart_policy=FREE, deadlines__active_seconds=60)
    waits(life, KILLED, silent, 3)
    assert life.see(KILLED) == ()
    assert life.requeue == 30
    life.wait(30)
    assert life.see() == ()
    assert life.condition("Failed") == ("True", "ActiveDeadlineExceeded")


def test_an_attempt_records_its_own_steps_and_the_rank_that_failed_first() -> None:
    life = begun(restart_policy=FREE)
    life.see(trained(1, 500, saved=400))
    cause = Termination(
        failure_class=FailureClass.WORKER_LOST, exit_code=ExitCode.KILLED, message="x", rank=3
    )
    life.see(Observation(AttemptPhase.FAILED, all_gone=True, termination=cause, node="gpu-2"))
    life.see(trained(1, 500, saved=400))  # such as a file of the attempt before
    life.see(KILLED)
    first, second, _ = life.status.attempts
    assert (first.rank, first.node, first.last_step, first.saved_step) == (3, "gpu-2", 500, 400)
    assert (second.rank, second.last_step, second.saved_step) == (None, None, None)
    assert life.status.progress.step == 500


def test_the_message_of_an_attempt_may_report_a_later_step_than_its_page() -> None:
    life = begun(restart_policy=FREE)
    life.see(trained(1, 500, saved=400))
    ref = CheckpointRef(step=510, path="/c/step-510", time=0.0, world_size=1)
    last = Termination(
        failure_class=FailureClass.PREEMPTED,
        exit_code=ExitCode.PREEMPTED,
        message="stopped",
        step=510,
        checkpoint=ref,
    )
    life.see(Observation(AttemptPhase.FAILED, all_gone=True, termination=last))
    assert (life.status.attempts[0].last_step, life.status.attempts[0].saved_step) == (510, 510)

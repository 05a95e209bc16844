"""How long a new status may wait until it is written."""

from datetime import datetime, timedelta

import pytest

from decisions import START, Life
from finetune_operator.api.v1alpha1.status import BackendRef, FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Observation, Obstacle
from finetune_operator.kernel.status_writer import NO_DELAY, Delay, WriteDelays
from finetune_operator.kube.cache import Key
from finetune_operator.reconcile.decide import Rejection, unreconcilable

KEY = Key("ns", "tiny")
RUNS = Observation(AttemptPhase.RUNNING, nodes_ready=1)
STUCK = Observation(AttemptPhase.PENDING, obstacle=Obstacle("Unschedulable", "no node"))


def delay_of(
    saved: FineTuneJobStatus,
    new: FineTuneJobStatus,
    now: datetime,
    *,
    reports: WriteDelays | None = None,
    created: datetime = START,
    with_handle: bool = False,
    is_busy: bool = False,
) -> Delay:
    return (reports or WriteDelays()).delay(
        KEY, saved, new, now, created=created, with_handle=with_handle, is_busy=is_busy
    )


@pytest.mark.parametrize(
    ("seen", "age", "left"),
    [
        pytest.param(RUNS, 0, 3, id="three seconds once its nodes run"),
        pytest.param(RUNS, 2.5, 0.5, id="the rest of three seconds"),
        pytest.param(RUNS, 3, 0, id="no longer once its nodes run"),
        pytest.param(None, 3, 7, id="ten seconds while its nodes may come"),
        pytest.param(None, 10, 0, id="no longer however long they take"),
    ],
)
@pytest.mark.parametrize("is_busy", [False, True])
def test_that_an_attempt_was_opened_may_stay_untold(
    seen: Observation | None, age: float, left: float, is_busy: bool
) -> None:
    life = Life()
    saved = life.status
    life.see()
    opened = life.decide(seen).status
    delay = delay_of(saved, opened, life.now + timedelta(seconds=age), is_busy=is_busy)
    busy = Delay(20, until_idle=True) if is_busy else NO_DELAY
    assert delay == (Delay(left) if left else busy)


def test_an_attempt_that_cannot_be_found_by_its_name_is_told_of_at_once() -> None:
    life = Life()
    opened = life.decide().status
    assert not delay_of(life.status, opened, life.now, with_handle=True, is_busy=True)


def test_an_attempt_that_is_opened_late_is_told_of_after_three_seconds() -> None:
    life = Life()
    saved, opened, long_ago = life.status, life.decide().status, START - timedelta(hours=1)
    assert delay_of(saved, opened, life.now, created=long_ago) == Delay(3)


@pytest.mark.parametrize("is_opened", [False, True], ids=["with the opening", "after it"])
def test_a_start_with_nothing_in_its_way_is_told_when_it_is_quiet_or_after_twenty_seconds(
    is_opened: bool,
) -> None:
    life, reports = Life(), WriteDelays()
    saved = life.status
    life.see()
    if is_opened:
        saved = life.status
    new, start = life.decide(RUNS).status, life.now + timedelta(seconds=20)

    def left(seconds: float, *, is_busy: bool) -> Delay:
        now = start + timedelta(seconds=seconds)
        return delay_of(saved, new, now, reports=reports, is_busy=is_busy)

    assert left(0, is_busy=True) == Delay(20, until_idle=True)
    assert left(4, is_busy=True) == Delay(16, until_idle=True)
    assert not left(4, is_busy=False)
    assert not left(20, is_busy=True)


def test_the_time_that_a_report_waits_counts_anew_once_it_was_written() -> None:
    life, reports = Life(), WriteDelays()
    saved = life.status
    life.see()
    later = life.now + timedelta(seconds=20)
    assert delay_of(saved, life.status, later, reports=reports, is_busy=True)
    reports.note(KEY, life.status, later)
    new, at_last = life.decide(RUNS).status, later + timedelta(seconds=30)
    delay = delay_of(life.status, new, at_last, reports=reports, is_busy=True)
    assert delay == Delay(20, until_idle=True)


def test_what_keeps_an_attempt_from_running_is_told_at_once_however_busy_and_so_is_its_end() -> (
    None
):
    life = Life()
    saved = life.status
    life.see()
    stuck = life.decide(STUCK).status
    assert not delay_of(saved, stuck, life.now, is_busy=True)
    assert not delay_of(life.status, stuck, life.now, is_busy=True)
    life.see(STUCK)
    assert not delay_of(stuck, life.decide(RUNS).status, life.now, is_busy=True)


def test_new_words_wait_but_a_handle_that_comes_with_them_does_not() -> None:
    life, reports = Life(), WriteDelays()
    life.see()
    for message in ("0/1 nodes", "0/2 nodes"):
        saved = life.status
        life.see(Observation(AttemptPhase.PENDING, obstacle=Obstacle("Unschedulable", message)))
        delay = delay_of(saved, life.status, life.now, reports=reports)
        reports.note(KEY, life.status, life.now)
    assert delay == Delay(15)
    ref = BackendRef(kind="Fake", name="another")
    other = saved.model_copy(update={"backend_ref": ref})
    assert not delay_of(other, life.status, life.now, reports=reports)


def test_the_end_of_a_stall_is_told_at_once_however_busy() -> None:
    life = Life()
    life.see()
    held = unreconcilable(life.status, Rejection("BackendFailed", "no right"), life.now, 1)
    assert not delay_of(held, life.decide(RUNS).status, life.now, is_busy=True)

"""What is decided about a job whose open attempt could not be created."""

import pytest

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.reconcile.decide import (
    PATIENCE_SECONDS,
    RECHECK_SECONDS,
    Find,
    Submit,
    SubmitFailed,
)
from support.reconcile.decisions import Life

NO_ANSWER = SubmitFailed("the API server did not answer")
NOT_YET = SubmitFailed("pods of another attempt run", is_absent=True)
QUOTA = SubmitFailed("exceeded quota: team", needs_fix=True)
ABSENT = SubmitFailed("nothing of it was created", is_absent=True)


def opened(**overrides: object) -> Life:
    """Return the life of a job whose first attempt is opened and not created."""
    life = Life(**overrides)
    life.job = life.job.model_copy(update={"status": life.decide().status})
    return life


def test_what_may_pass_by_itself_is_told_once_it_has_lasted() -> None:
    life = opened()
    before = life.status
    life.wait(PATIENCE_SECONDS - 1)
    assert life.see(NO_ANSWER) == ()
    assert (life.status, life.requeue) == (before, None)
    life.wait(1)
    assert life.see(NO_ANSWER) == ()
    assert life.status.phase is JobPhase.STARTING
    assert life.condition("ResourcesReady") == ("False", "CreationFailed")
    assert life.condition("Reconciling")[0] == "True"
    assert life.said("ResourcesReady") == NO_ANSWER.message


def test_what_somebody_must_mend_stalls_the_job_at_once() -> None:
    life = opened()
    assert life.see(QUOTA) == ()
    assert life.condition("Stalled") == ("True", "CreationFailed")
    assert life.said("Stalled") == QUOTA.message
    assert life.requeue == RECHECK_SECONDS
    assert life.decide().actions == (Submit(1),)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"pendingSeconds": 60}, "PendingDeadlineExceeded"),
        ({"activeSeconds": 60}, "ActiveDeadlineExceeded"),
    ],
    ids=["pending", "active"],
)
def test_a_deadline_fails_the_job_once_nothing_of_the_attempt_exists(
    limits: dict[str, int], reason: str
) -> None:
    life = opened(deadlines=limits)
    life.see(QUOTA)
    life.wait(59)
    assert life.decide().actions == (Submit(1),)
    life.wait(1)
    assert life.decide().actions == (Find(1),)
    life.see(NO_ANSWER)
    assert life.status.phase is JobPhase.STARTING  # it may have been created
    life.see(QUOTA)
    assert life.see(ABSENT) == ()
    assert life.status.phase is JobPhase.FAILED
    assert life.condition("Failed") == ("True", reason)
    assert f"60: {QUOTA.message}; " in life.said("Failed")
    assert life.status.attempts[0].end_time is not None
    assert life.status.attempts[0].message == QUOTA.message


def test_no_deadline_passes_before_anything_was_told_to_be_in_the_way() -> None:
    life = opened(deadlines={"pendingSeconds": 60})
    life.wait(61)
    assert life.decide().actions == (Submit(1),)
    life.see(NOT_YET)
    assert life.condition("ResourcesReady") == ("False", "CreationFailed")
    assert life.decide().actions == (Find(1),)


def test_a_job_that_is_to_be_suspended_says_that_its_attempt_may_yet_exist() -> None:
    life = opened(deadlines={"pendingSeconds": 1})
    life.suspend(True)
    life.wait(60)
    life.see(NOT_YET)
    assert life.status.phase is JobPhase.SUSPENDING
    assert life.said("Suspended") == (
        "waiting until no process of attempt 1 can run: pods of another attempt run"
    )


def test_a_job_that_is_resumed_says_why_its_attempt_cannot_go_on() -> None:
    life = opened()
    life.suspend(True)
    life.see(Observation(AttemptPhase.UNKNOWN, all_gone=True))
    assert life.status.phase is JobPhase.SUSPENDED
    suspended = life.status
    life.wait(60)
    life.see(NOT_YET)
    assert life.status == suspended
    assert life.condition("Ready") == ("True", "SuspendedByUser")
    life.suspend(False)
    life.see(NOT_YET)
    assert life.said("Suspended") == (
        "resumed, but attempt 1 cannot start yet: pods of another attempt run"
    )
    told = [life.condition(kind)[0] for kind in ("Suspended", "Ready", "Reconciling")]
    assert told == ["True", "False", "True"]


def test_nothing_is_said_of_a_job_without_an_open_attempt() -> None:
    life = Life()
    before = life.status
    life.see(NO_ANSWER)
    assert life.status == before

"""How long a job waits: for its nodes, for the ranks at the rendezvous, for another job."""

from dataclasses import replace

import pytest

from finetune_operator.backends.base import AttemptPhase, Effect, Observation, Obstacle
from finetune_operator.reconcile.decide import Submit
from finetune_trainer.config import FailureClass, Phase, Termination, TimeSpent
from support.kernel.fake_backend import PREEMPTED, ended
from support.reconcile.decisions import PENDING, Life, lives, running

NO_NODE = Obstacle("Unschedulable", "pod tiny-1-0 has no node: 0/3 nodes are available")
STUCK = replace(PENDING, obstacle=NO_NODE)
MISSING = "1 of 2 ranks have not arrived (1)"
GAVE_WAY = Termination(
    failure_class=FailureClass.PREEMPTED, exit_code=75, message="gave way to job team/older"
)
REMEDY = "remove this obstacle or raise the limit, then create the job again"


def started(**overrides: object) -> Life:
    life = Life(**overrides)
    assert life.see() == (Submit(1),)
    return life


def waiting(age: float, missing: str | None = MISSING) -> Observation:
    """Return the observation of an attempt whose rank 0 has been alive for `age` seconds."""
    spent = TimeSpent(starting=age)
    return running(0, Phase.STARTING, waits_for=missing, spent=spent)


def wait(life: Life, seconds: int, *, missing: str | None = MISSING) -> None:
    """Let all nodes run for that time, with a decision every ten seconds; no attempt ends."""
    for age in range(0, seconds, 10):
        assert life.see(waiting(age, missing)) == ()
        life.wait(10)


def test_ranks_that_do_not_arrive_within_600_s_end_the_attempt_and_are_named() -> None:
    life = started()
    wait(life, 600)
    assert life.said("Ready") == f"all nodes of attempt 1 run; {MISSING}"
    assert life.see(waiting(600)) == life.cancel_in(10.0)
    message = life.said("Ready")
    assert message.startswith(f"{MISSING} within 600 s after all nodes ran; see the logs of ")
    assert message.endswith("; waiting until all of its processes are gone")
    assert life.see(lives(PREEMPTED))  # an operator that starts now repeats the cancel
    assert life.said("Ready") == message
    assert life.see(PREEMPTED) == (Submit(2),)
    first = life.status.attempts[0]
    assert (first.failure_class, first.exit_code) == ("Hung", 1)
    assert first.message.startswith(MISSING)
    assert life.status.restarts.counted == 1


def test_the_decision_of_600_s_needs_no_event() -> None:
    life = started()
    wait(life, 590)
    life.see(replace(waiting(590), requeue_seconds=None))
    assert life.requeue == 10.0


def test_an_error_of_the_trainer_is_not_hidden_by_the_end_of_its_wait() -> None:
    life = started()
    wait(life, 600)
    life.see(waiting(600))
    life.see(ended(65, FailureClass.DATA_ERROR, "train.jsonl is missing"))
    assert life.condition("Failed") == ("True", "DataError")
    assert life.said("Failed") == "train.jsonl is missing"


@pytest.mark.parametrize(
    ("seconds", "missing"),
    [
        pytest.param(7200, None, id="an image whose ranks have a limit of their own"),
        pytest.param(590, MISSING, id="not long enough"),
    ],
)
def test_the_operator_ends_no_other_wait(seconds: int, missing: str | None) -> None:
    wait(started(), seconds, missing=missing)


def test_ranks_that_were_started_again_in_their_pods_have_the_whole_time() -> None:
    life = started()
    life.see(running(5))
    life.wait(3600)
    assert life.see(waiting(5)) == ()
    life.wait(600)
    assert life.see(waiting(605)) == life.cancel_in(10.0)


def test_half_a_gang_waits_as_long_as_the_pending_deadline_allows() -> None:
    life = started(deadlines__pending_seconds=7200)
    for _ in range(719):
        life.wait(10)
        assert life.see(replace(STUCK, nodes_ready=1)) == ()
    assert life.status.restarts.counted == 0
    life.wait(10)
    assert life.see(STUCK) == life.cancel_in(120.0)


def test_failed_and_the_attempt_repeat_the_obstacle() -> None:
    life = started(deadlines__pending_seconds=60)
    life.see(STUCK)
    life.wait(60)
    life.see(PENDING)  # the last status has the words of the scheduler
    life.see(Observation(AttemptPhase.FAILED, all_gone=True, message="Job tiny-1 is being ended"))
    text = f"no resources within deadlines.pendingSeconds 60: {NO_NODE.message}; {REMEDY}"
    assert life.condition("Failed") == ("True", "PendingDeadlineExceeded")
    assert life.said("Failed") == life.status.attempts[0].message == text


def test_the_pending_deadline_counts_over_attempts_that_never_ran() -> None:
    life = started(deadlines__pending_seconds=60)
    for number in (2, 3):
        life.wait(20)
        life.see(STUCK)
        assert life.end(PREEMPTED) == (Submit(number),)
    life.wait(9)  # the third attempt has waited 10 s for its start
    assert life.see(STUCK) == ()
    life.wait(1)
    assert life.see(STUCK) == life.cancel_in(120.0)


def test_the_pending_deadline_also_passes_between_two_attempts() -> None:
    life = started(deadlines__pending_seconds=60)
    life.see(STUCK)
    life.wait(61)
    assert life.see(PREEMPTED) == ()
    assert life.condition("Failed") == ("True", "PendingDeadlineExceeded")
    assert NO_NODE.message in life.said("Failed")


def test_more_attempts_than_the_status_has_count_as_well() -> None:
    life = started(deadlines__pending_seconds=3600)
    for _ in range(12):  # 1200 s, and 2110 s between the attempts
        life.wait(100)
        life.see(STUCK)
        assert life.end(PREEMPTED) != ()
    life.wait(289)
    assert life.see(STUCK) == ()
    life.wait(1)
    assert life.see(STUCK) == life.cancel_in(120.0)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(PREEMPTED, id="preempted"),
        pytest.param(ended(1, FailureClass.ERROR, "raised"), id="an error"),
    ],
)
def test_an_attempt_that_had_its_nodes_starts_the_wait_again(end: Observation) -> None:
    life = started(deadlines__pending_seconds=60)
    life.wait(50)
    life.see(STUCK)
    life.see(running(3))
    life.wait(100)
    life.see(lives(end))
    life.wait(100)  # saves its checkpoint
    assert life.see(end) == (Submit(2),)
    life.wait(59)
    assert life.see(STUCK) == ()
    life.wait(1)
    assert life.see(STUCK) == life.cancel_in(120.0)


def test_attempts_that_end_in_their_first_second_do_not_wait_for_nodes() -> None:
    life = started(deadlines__pending_seconds=60, restart_policy__backoff={"baseSeconds": 0})
    for _ in range(3):
        life.wait(40)
        assert len(life.end(ended(1, FailureClass.ERROR, "raised"))) == 1


def test_a_suspension_starts_the_wait_again() -> None:
    life = started(deadlines__pending_seconds=60)
    life.wait(50)
    life.see(STUCK)
    life.suspend(True)
    life.see(STUCK)
    life.see(PREEMPTED)
    life.wait(3600)
    life.suspend(False)
    assert life.see() == (Submit(2),)
    life.wait(59)
    assert life.see(STUCK) == ()


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({}, id="default"),
        pytest.param({"maxDisruptions": 0}, id="no disruption allowed"),
        pytest.param({"rules": [{"onClass": "Preempted", "action": "Fail"}]}, id="a rule"),
    ],
)
def test_an_attempt_that_gives_way_uses_up_no_budget(policy: dict[str, object]) -> None:
    life = started(restartPolicy=policy)
    assert life.see(replace(STUCK, gives_up=GAVE_WAY)) == life.cancel_in(10.0)
    assert life.said("Ready").startswith("gave way to job team/older; waiting until ")
    assert life.see(ended(75, FailureClass.PREEMPTED, "asked to stop")) == (Submit(2),)
    first = life.status.attempts[0]
    assert (first.failure_class, first.message) == ("Preempted", GAVE_WAY.message)
    assert life.status.restarts.counted == life.status.restarts.disruptions == 0


def test_giving_way_does_not_start_the_pending_deadline_again() -> None:
    life = started(deadlines__pending_seconds=300)
    for _ in range(2):
        life.wait(120)
        life.see(replace(STUCK, gives_up=GAVE_WAY))
        life.end(PREEMPTED)
    life.wait(50)  # the third attempt has waited 10 s for its start
    assert life.see(STUCK) == life.cancel_in(120.0)


def test_a_suspended_attempt_does_not_give_way() -> None:
    life = started()
    life.suspend(True)
    life.see(replace(STUCK, gives_up=GAVE_WAY))
    life.see(PREEMPTED)
    assert life.status.attempts[0].message != GAVE_WAY.message
    assert life.condition("Suspended") == ("True", "SuspendedByUser")


def test_time_in_a_queue_is_never_part_of_the_wait() -> None:
    life = started(deadlines__pending_seconds=60, queue={"name": "team"})
    in_queue = Obstacle("Queued", "waits in queue team", Effect.QUEUED)
    for number in (2, 3):
        life.wait(3600)
        life.see(replace(PENDING, obstacle=in_queue))
        assert life.end(PREEMPTED) == (Submit(number),)
    life.see(STUCK)
    life.wait(59)
    assert life.see(STUCK) == ()

"""How long "all nodes run" may wait for "the attempt trains"."""

from datetime import timedelta

import pytest

from finetune_operator.backends.base import AttemptPhase, Effect, Observation, Obstacle
from finetune_operator.kernel.status_writer import nodes_left
from finetune_operator.reconcile.decide import Rejection, unreconcilable
from finetune_trainer.config import FailureClass
from support.kernel.fake_backend import ended
from support.reconcile.decisions import PENDING, Life, running

RUNS = Observation(AttemptPhase.RUNNING, nodes_ready=1)
STUCK = Observation(AttemptPhase.PENDING, obstacle=Obstacle("Unschedulable", "no node"))
STALLED = Observation(
    AttemptPhase.PENDING, obstacle=Obstacle("CreationFailed", "no right", Effect.STALLED)
)


def opened() -> Life:
    """Return a job whose first attempt is open and pending."""
    life = Life()
    life.see()
    life.see(PENDING)
    return life


@pytest.mark.parametrize(("age", "left"), [(0, 15), (4, 11), (14.5, 0.5), (15, 0), (600, 0)])
def test_nodes_that_run_wait_until_15_seconds_after_the_opening(age: float, left: float) -> None:
    life = opened()
    saved = life.status
    life.wait(age)
    assert nodes_left(saved, life.decide(RUNS).status, life.now) == left


def test_nodes_of_a_later_attempt_wait_from_its_own_opening() -> None:
    life = opened()
    life.see(running(3))
    life.wait(600)
    life.see(ended(137, FailureClass.WORKER_LOST, "killed"))
    assert life.status.attempt == 2
    life.see(PENDING)
    assert nodes_left(life.status, life.decide(RUNS).status, life.now) == 15


def test_opening_of_an_attempt_never_waits() -> None:
    life = Life()
    assert nodes_left(life.status, life.decide().status, life.now) == 0
    life.see()
    life.see(running(3))
    opened_next = life.decide(ended(137, FailureClass.WORKER_LOST, "killed")).status
    assert opened_next.attempt == 2
    assert nodes_left(life.status, opened_next, life.now) == 0


@pytest.mark.parametrize("obstacle", [STUCK, STALLED], ids=["delays", "stalls"])
def test_begin_and_end_of_an_obstacle_never_wait(obstacle: Observation) -> None:
    life = opened()
    saved = life.status
    assert nodes_left(saved, life.decide(obstacle).status, life.now) == 0
    life.see(obstacle)
    for end in (PENDING, RUNS):
        assert nodes_left(life.status, life.decide(end).status, life.now) == 0


def test_end_of_a_refusal_never_waits() -> None:
    life = opened()
    held = unreconcilable(life.status, Rejection("BackendFailed", "no right"), life.now, 1)
    assert nodes_left(held, life.decide(RUNS).status, life.now) == 0


def test_first_step_never_waits() -> None:
    life = opened()
    assert nodes_left(life.status, life.decide(running(1)).status, life.now) == 0


def test_suspension_and_a_later_generation_never_wait() -> None:
    life = opened()
    saved = life.status
    life.suspend(True)
    assert nodes_left(saved, life.decide(RUNS).status, life.now) == 0
    life.suspend(False)
    metadata = life.job.metadata.model_copy(update={"generation": 2})
    life.job = life.job.model_copy(update={"metadata": metadata})
    assert nodes_left(saved, life.decide(RUNS).status, life.now) == 0


def test_lost_node_waits_like_a_gained_one() -> None:
    life = opened()
    life.see(RUNS)
    life.wait(5)
    fewer = Observation(AttemptPhase.PENDING, nodes_ready=0)
    assert nodes_left(life.status, life.decide(fewer).status, life.now) == 10
    life.wait(timedelta(seconds=10).total_seconds())
    assert nodes_left(life.status, life.decide(fewer).status, life.now) == 0

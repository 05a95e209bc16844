"""The time ledger of a job: each millisecond once, whatever happens and whoever leads."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.categories import Category
from finetune_operator.reconcile.conditions import is_finished
from finetune_operator.reconcile.ledger import accrue_until, apply_report
from finetune_trainer.config import FailureClass, Phase
from support.kernel.fake_backend import ended
from support.reconcile.decisions import PENDING
from support.reconcile.ledgers import BETWEEN, GPUS, QUEUED, LedgerLife, Rank, killed, training

LOADED = 20.0
PHASES = st.sampled_from([one for one in Phase if one is not Phase.STARTING])


def started(life: LedgerLife, resumed: int = 0, starts: int = 0) -> Rank:
    """Let the nodes of an attempt come after 30 s, and its rank 0 train 20 s later."""
    life.look(PENDING)
    life.wait(30)
    life.look(BETWEEN)
    rank = Rank(life.now, resumed=resumed, starts=starts)
    life.wait(LOADED)
    rank.enter(Phase.TRAINING, life.now)
    return rank


def test_a_life_without_trouble() -> None:
    life = LedgerLife()
    life.wait(5)
    life.look()
    life.look(QUEUED)
    life.wait(60)
    rank = started(life)
    life.wait(100)
    rank.make(10)
    life.look(training(rank.report(life.now)))
    rank.enter(Phase.EVALUATING, life.now)
    life.wait(7)
    rank.enter(Phase.EXPORTING, life.now)
    life.wait(3)
    rank.enter(Phase.DONE, life.now)
    last = rank.report(life.now)
    life.wait(2)
    done = ended(0)
    assert done.termination is not None
    said = done.termination.model_copy(update={"progress": last})
    life.look(replace(done, termination=said))
    assert life.seconds() == {
        "queued": 65.0,
        "provisioning": 30.0,
        "starting": 20.0,
        "productive": 100.0,
        "evaluation": 7.0,
        "exporting": 3.0,
        "other": 2.0,
    }
    life.wait(1000)
    assert sum(life.seconds().values()) == 227.0


def test_what_a_killed_attempt_did_not_save_is_recomputed_and_what_it_did_not_report_is_other() -> (
    None
):
    life = LedgerLife()
    life.look()
    rank = started(life)
    life.wait(100)
    rank.make(10)
    life.look(training(rank.report(life.now)))
    life.wait(4)
    life.look(killed())
    life.wait(10)
    life.look()
    rank = started(life, resumed=5)
    life.wait(100)
    rank.make(10)
    life.look(training(rank.report(life.now)))
    assert life.seconds() == {
        "provisioning": 30.0,
        "starting": LOADED,
        "productive": 150.0,
        "other": 4.0,
        "restarting": 10 + 30 + LOADED,
        "recomputed": 50.0,
    }
    assert dict(life.ledger.restarts) == {"WorkerLost": 1}
    assert (life.ledger.recoveries, life.ledger.recovery) == (1, 60_000)
    assert life.ledger.first_step == 150_000


def test_a_suspension_is_no_restart() -> None:
    life = LedgerLife()
    life.look()
    rank = started(life)
    life.wait(10)
    rank.make(1)
    life.look(training(rank.report(life.now)))
    life.suspend(True)
    life.look(training(rank.progress))
    rank.enter(Phase.STOPPING, life.now)
    life.wait(3)
    life.look(training(rank.report(life.now)))
    life.look(ended(75, FailureClass.PREEMPTED, "stopped"))
    life.wait(500)
    life.suspend(False)
    life.look()
    started(life, resumed=1)
    assert life.seconds() == {
        "provisioning": 60.0,
        "starting": 2 * LOADED,
        "productive": 10.0,
        "checkpoint": 3.0,
        "suspended": 500.0,
    }
    assert not life.ledger.restarts
    assert not life.ledger.recoveries


def test_ranks_that_are_started_again_in_place_have_restarted() -> None:
    life = LedgerLife()
    life.look()
    rank = started(life)
    life.wait(10)
    rank.make(10)
    life.look(training(rank.report(life.now)))
    life.wait(2)
    rank = Rank(life.now, resumed=10, starts=1)
    life.wait(5)
    rank.enter(Phase.TRAINING, life.now)
    life.wait(10)
    rank.make(1)
    life.look(training(rank.report(life.now)))
    assert life.seconds() == {
        "provisioning": 30.0,
        "starting": LOADED,
        "productive": 20.0,
        "restarting": 7.0,
    }
    assert (life.ledger.recoveries, life.ledger.recovery) == (1, 7000)


def test_gpus_count_while_their_node_runs() -> None:
    life = LedgerLife()
    life.look()
    rank = started(life)
    life.wait(100)
    rank.make(10)
    life.look(training(rank.report(life.now)))
    times = accrue_until(life.ledger, life.now).gpu_time
    assert times == {
        Category.STARTING: GPUS * 1000 * LOADED,
        Category.PRODUCTIVE: GPUS * 1000 * 100,
    }


def test_a_report_of_a_trainer_without_an_account_counts_by_its_phase() -> None:
    life = LedgerLife()
    life.look()
    rank = started(life)
    for _ in range(2):
        said = rank.report(life.now).model_copy(update={"spent": None})
        life.look(training(said))
        life.wait(10)
        rank.make(1)
    assert life.seconds() == {"provisioning": 30.0, "starting": LOADED, "productive": 20.0}


class AnyLife(RuleBasedStateMachine):
    """A job to which anything happens, at any moment, under any leader."""

    def __init__(self) -> None:
        super().__init__()
        self.life = LedgerLife()
        self.rank: Rank | None = None
        self.starts = 0
        self.highest = 0

    @property
    def is_open(self) -> bool:
        return attempts.current(self.life.status) is not None

    @property
    def is_over(self) -> bool:
        return is_finished(self.life.status)

    @rule(milliseconds=st.integers(0, 100_000))
    def wait(self, milliseconds: int) -> None:
        if not self.is_over:
            self.life.now += timedelta(milliseconds=milliseconds)

    @precondition(lambda self: not self.is_open)
    @rule()
    def look_between_attempts(self) -> None:
        self.rank = None
        self.life.look()

    @precondition(lambda self: self.is_open and self.rank is None)
    @rule(seen=st.sampled_from([PENDING, QUEUED, BETWEEN]))
    def wait_for_nodes(self, seen: object) -> None:
        self.life.look(seen)  # type: ignore[arg-type]

    @precondition(lambda self: self.is_open and self.rank is None)
    @rule(skew=st.floats(-5, 5), lost=st.integers(0, 10))
    def begin(self, skew: float, lost: int) -> None:
        step = max(0, self.highest - lost)
        self.rank, self.starts = Rank(self.life.now, skew=skew, resumed=step), 0

    @precondition(lambda self: self.rank is not None)
    @rule(phase=PHASES, steps=st.integers(0, 5))
    def work(self, phase: Phase, steps: int) -> None:
        assert self.rank is not None
        self.rank.enter(phase, self.life.now)
        self.rank.make(steps)
        self.highest = max(self.highest, self.rank.progress.step)

    @precondition(lambda self: self.is_open and self.rank is not None)
    @rule()
    def look(self) -> None:
        assert self.rank is not None
        self.life.look(training(self.rank.report(self.life.now)))

    @precondition(lambda self: self.is_open and self.rank is not None)
    @rule()
    def look_at_what_was_reported_before(self) -> None:
        assert self.rank is not None
        self.life.look(training(self.rank.progress))

    @precondition(lambda self: self.rank is not None)
    @rule()
    def restart_in_place(self) -> None:
        assert self.rank is not None
        self.starts += 1
        self.rank = Rank(self.life.now, resumed=self.rank.progress.step, starts=self.starts)

    @precondition(lambda self: self.is_open)
    @rule(code=st.sampled_from([0, 75, 137, 137, 137]), is_told=st.booleans())
    def end(self, code: int, is_told: bool) -> None:
        classes = {0: FailureClass.COMPLETED, 75: FailureClass.PREEMPTED}
        seen = ended(code, classes.get(code, FailureClass.WORKER_LOST))
        if self.rank is not None and is_told:
            said = self.rank.report(self.life.now)
            gpus = self.life.ledger.gpus
            number = self.life.status.attempt
            self.life.ledger = apply_report(self.life.ledger, number, said, gpus, self.life.now)
        self.life.look(seen)
        self.rank = None

    @rule(value=st.booleans())
    def suspend(self, value: bool) -> None:
        self.life.suspend(value)

    @rule()
    def write(self) -> None:
        self.life.write()

    @rule()
    def lead_anew(self) -> None:
        """A leader that is gone has written each attempt before it was created, and its end."""
        self.life.write()
        self.life.change_leader()

    @invariant()
    def each_millisecond_is_in_one_category(self) -> None:
        times = self.life.times()
        if not self.life.ledger.is_closed:
            assert sum(times.values()) == self.life.age
        assert all(spent > 0 for spent in times.values())

    @invariant()
    def what_is_over_is_as_long_as_the_job_was(self) -> None:
        if self.life.ledger.is_closed:
            assert sum(self.life.times().values()) == self.life.age

    @invariant()
    def gpus_are_counted_no_longer_than_the_job_lives(self) -> None:
        now = accrue_until(self.life.ledger, self.life.now)
        for category, spent in now.gpu_time.items():
            assert spent <= GPUS * now.time[category]


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("late", [0.0, 8.0])
def test_a_leader_that_comes_late_gives_each_part_what_rank_0_says(late: float) -> None:
    life = LedgerLife()
    life.look()
    rank = started(life)
    life.wait(10)
    rank.make(10)
    life.look(training(rank.report(life.now)))
    life.write()
    life.wait(20)
    rank.make(20)
    life.look(training(rank.report(life.now)))  # which nobody writes
    rank.enter(Phase.EVALUATING, life.now)
    life.wait(late)
    life.change_leader()
    assert sum(life.times().values()) == life.age
    life.look(training(rank.report(life.now)))
    parts = {"provisioning": 30.0, "starting": LOADED, "productive": 30.0, "evaluation": late}
    assert life.seconds() == {name: seconds for name, seconds in parts.items() if seconds}

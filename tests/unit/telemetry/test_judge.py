"""Who holds the others back, as the judge finds it in looks at ranks that are played here."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.config import Suspect, SuspectCause
from finetune_trainer.telemetry.boundary import Boundary
from finetune_trainer.telemetry.node.judge import Findings, Judge
from finetune_trainer.telemetry.node.recorder_client import num_begun
from finetune_trainer.telemetry.node.slow import SlowPace
from finetune_trainer.telemetry.node.snapshots import RankSnapshot, Seen
from finetune_trainer.telemetry.node.stuck import StuckPace


@dataclass
class Rank:
    """A rank whose steps take as long as a test says, in seconds."""

    number: int
    compute: float = 1.0
    data: float = 0.0
    checkpoint: float = 0.0
    process: str | None = "S"
    phase: str = "forward"
    steps: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    position: int | None = 0
    recorded: int | None = None
    is_silent: bool = False
    process_start: int = 1

    @property
    def busy(self) -> float:
        return self.compute + self.data + self.checkpoint

    def look(self, now: float) -> Seen:
        waiting, data, checkpoint = self.sums
        boundary = Boundary(
            steps=self.steps,
            at=now,
            waiting_seconds=waiting,
            data_seconds=data,
            checkpoint_seconds=checkpoint,
            apart_seconds=0,
        )
        look = RankSnapshot(
            rank=self.number,
            process_start=self.process_start,
            process=self.process,
            phase=self.phase,
            boundary=boundary if self.steps else None,
            position=self.position,
            recorded=self.recorded,
        )
        return Seen(look, f"node-{self.number // 2}", self.is_silent)


class Run:
    """Ranks that make the same steps, and a judge who looks after each of them."""

    def __init__(self, *busy: float, slow: SlowPace | None = None) -> None:
        self.ranks = [Rank(number, one) for number, one in enumerate(busy)]
        self.judge = Judge(slow or SlowPace(), StuckPace())
        self.now = 1_000.0

    def step(self) -> Findings:
        """Let all make a step, in which all wait for the busiest."""
        longest = max(one.busy for one in self.ranks)
        self.now += longest
        for one in self.ranks:
            one.steps += 1
            parts = (longest - one.busy, one.data, one.checkpoint)
            one.sums = [before + part for before, part in zip(one.sums, parts, strict=True)]
            one.position = 3 * one.steps
        return self.look()

    def look(self, seconds: float = 0.0, *, is_training: bool = True) -> Findings:
        """Look after so long, in which nobody makes a step."""
        self.now += seconds
        seen = {one.number: one.look(self.now) for one in self.ranks}
        return self.judge.look(self.now, seen, is_training=is_training)

    def steps(self, count: int) -> Findings:
        """Return what is found after so many steps."""
        found = Findings()
        for _ in range(count):
            found = self.step()
        return found

    def suspects_of_a_stall(self, seconds: float) -> tuple[Suspect, ...]:
        """Return whom it suspects after nobody has got on for so long, a second at a time."""
        found = Findings()
        for _ in range(int(seconds)):
            found = self.look(1.0)
        return found.suspects


def until_named(run: Run, limit: float) -> float | None:
    """Return how long it takes until somebody is suspected."""
    began = run.now
    while run.now - began < limit:
        if run.step().suspects:
            return run.now - began
    return None


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 64])
def test_a_rank_that_is_20_percent_slower_is_named_in_30_seconds(num_ranks: int) -> None:
    run = Run(*[0.1] * (num_ranks - 1), 0.12)
    seconds = until_named(run, 60)
    assert seconds is not None
    assert seconds < 30
    (found,) = run.step().suspects
    assert (found.rank, found.node) == (num_ranks - 1, f"node-{(num_ranks - 1) // 2}")
    assert (found.cause, found.score) == (SuspectCause.COMPUTE, 1.2)
    assert 1_000.0 <= found.since < 1_010.0


def test_the_score_of_each_rank_is_by_the_median_of_the_others() -> None:
    found = Run(1.0, 1.0, 2.0, 4.0).steps(12)
    assert found.scores == pytest.approx({0: 0.5, 1: 0.5, 2: 2.0, 3: 4.0})


@pytest.mark.parametrize(
    ("part", "cause"),
    [("data", SuspectCause.DATA), ("checkpoint", SuspectCause.CHECKPOINT)],
)
def test_the_cause_is_what_takes_the_rank_longer(part: str, cause: SuspectCause) -> None:
    run = Run(0.1, 0.1, 0.1, 0.1)
    for one in run.ranks:
        one.data = one.checkpoint = 0.02
    setattr(run.ranks[2], part, 0.06)
    assert until_named(run, 60) is not None
    assert [(one.rank, one.cause) for one in run.step().suspects] == [(2, cause)]


def test_steps_longer_than_a_window_are_compared_whole() -> None:
    run = Run(40.0, 40.0, 48.0, 40.0)
    assert [one.rank for one in run.steps(17).suspects] == [2]


def test_one_long_save_names_nobody() -> None:
    run = Run(0.1, 0.1, 0.1, 0.1)
    for _ in range(10):
        run.ranks[0].checkpoint = 10.0
        assert run.step().suspects == ()
        run.ranks[0].checkpoint = 0.0
        for _ in range(200):
            assert run.step().suspects == ()


def test_what_hardly_matters_is_not_named() -> None:
    """A fifth more of a hundredth of a step, the rest of which all wait for the network."""
    run = Run(0.01, 0.01, 0.012, 0.01)

    def step() -> Findings:
        for one in run.ranks:
            one.sums[0] += 0.5
        run.now += 0.5
        return run.step()

    assert not any(step().suspects for _ in range(200))


def test_among_ranks_that_differ_much_nobody_is_named() -> None:
    assert until_named(Run(1.0, 1.1, 1.2, 1.3, 1.4, 1.5), 300) is None


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_on_a_busy_machine_where_now_this_one_is_slow_and_now_that_one_few_are_named(
    num_ranks: int,
) -> None:
    """Of 20 runs of five minutes: each window is as slow for a rank as its machine is busy."""
    looks = named = 0
    for seed in range(20):
        chance, run = Random(seed), Run(*[0.5] * num_ranks)
        for _ in range(60):
            for one in run.ranks:
                one.compute = 0.5 * chance.lognormvariate(0, 0.25)
            for _ in range(10):
                looks, named = looks + 1, named + bool(run.step().suspects)
    assert named < 0.01 * looks


def test_a_rank_that_is_well_again_is_no_suspect_after_three_windows() -> None:
    run = Run(0.1, 0.1, 0.13, 0.1)
    until_named(run, 60)
    run.ranks[2].compute = 0.1
    began = run.now
    while run.step().suspects:
        assert run.now - began < 25
    assert run.now - began > 10


def test_a_rank_between_well_and_slow_stays_what_it_was() -> None:
    run = Run(0.1, 0.1, 0.107, 0.1)
    assert until_named(run, 60) is None
    run.ranks[2].compute = 0.13
    until_named(run, 60)
    run.ranks[2].compute = 0.107
    assert [one.rank for one in run.steps(300).suspects] == [2]


def test_a_start_anew_is_not_counted_as_work() -> None:
    run = Run(0.1, 0.1, 0.1, 0.1)
    for _ in range(5):
        run.steps(30)
        for one in run.ranks:
            one.process_start += 1
        run.now += 100
        assert run.steps(30).suspects == ()


@settings(max_examples=25)
@given(
    num_ranks=st.integers(2, 9),
    data=st.lists(st.floats(-0.01, 0.01), min_size=300, max_size=300),
)
def test_equal_ranks_are_never_named_whatever_a_step_brings(
    num_ranks: int, data: list[float]
) -> None:
    run = Run(*[0.2] * num_ranks)
    noise: Iterator[float] = iter(data)
    for _ in range(300 // num_ranks):
        for one in run.ranks:
            one.compute = 0.2 + next(noise)
        assert run.step().suspects == ()


def stuck(run: Run) -> Callable[[int], None]:
    """Let all ranks begin one more collective but the one that is given."""

    def stop(rank: int) -> None:
        for one in run.ranks:
            if one.number != rank:
                assert one.position is not None
                one.position += 1
                one.phase = "comm_exposed"

    return stop


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("state", "words"),
    [("S", "asleep"), ("R", "running"), ("D", "blocked in the kernel"), ("T", "stopped")],
)
def test_who_does_not_come_to_a_collective_is_named_with_the_state_of_its_process(
    num_ranks: int, state: str, words: str
) -> None:
    run = Run(*[0.1] * num_ranks)
    run.steps(20)
    stuck(run)(1)
    run.ranks[1].process = state
    began = run.now
    assert run.suspects_of_a_stall(29) == ()
    (found,) = run.suspects_of_a_stall(3)
    assert (found.rank, found.node, found.cause) == (1, "node-0", SuspectCause.STUCK)
    assert (found.score, found.process) == (None, words)
    assert abs(found.since - began) <= 1.0


def test_when_it_comes_it_is_no_suspect_any_more_and_the_next_stall_is_another() -> None:
    run = Run(0.1, 0.1, 0.1, 0.1)
    for number in (1, 2):
        run.steps(20)
        stuck(run)(3)
        run.suspects_of_a_stall(33)
        assert run.look().num_stalls == number
        assert run.step().suspects == ()


def test_where_all_have_come_who_cannot_take_part_is_named() -> None:
    run = Run(0.1, 0.1, 0.1, 0.1)
    run.steps(20)
    run.ranks[2].process = "T"
    assert [one.rank for one in run.suspects_of_a_stall(33)] == [2]


def test_where_ranks_have_noted_as_many_the_recorder_tells_who_has_begun_fewer() -> None:
    run = Run(0.1, 0.1, 0.1, 0.1)
    run.steps(20)
    for one in run.ranks:
        one.recorded = 300 if one.number == 2 else 301
    assert [one.rank for one in run.suspects_of_a_stall(33)] == [2]


def test_where_all_have_come_and_run_nobody_is_named() -> None:
    run = Run(0.1, 0.1, 0.1, 0.1)
    run.steps(20)
    assert run.suspects_of_a_stall(400) == ()


def test_a_node_that_is_silent_is_named_only_where_nobody_gets_on() -> None:
    run = Run(0.1, 0.1, 0.1, 0.1)
    run.steps(20)
    for one in run.ranks[2:]:
        one.is_silent = True
    for _ in range(400):
        for one in run.ranks[:2]:
            one.position = (one.position or 0) + 1
        assert not run.look(1.0).suspects
    found = run.suspects_of_a_stall(33)
    assert [(one.rank, one.process) for one in found] == [
        (rank, "not known, because its node is silent") for rank in (2, 3)
    ]


def test_a_long_step_has_more_patience() -> None:
    run = Run(8.0, 8.0)
    run.steps(5)
    stuck(run)(0)
    assert run.suspects_of_a_stall(78) == ()
    assert [one.rank for one in run.suspects_of_a_stall(4)] == [0]


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        ("checkpoint_blocking", SuspectCause.CHECKPOINT),
        ("eval", SuspectCause.STUCK),
        ("profiling", SuspectCause.STUCK),
    ],
)
def test_who_saves_evaluates_or_profiles_may_take_minutes(phase: str, cause: SuspectCause) -> None:
    run = Run(0.1, 0.1)
    run.steps(20)
    stuck(run)(0)
    run.ranks[0].phase = phase
    assert run.suspects_of_a_stall(298) == ()
    assert [one.cause for one in run.suspects_of_a_stall(4)] == [cause]


def test_before_its_first_step_a_rank_may_take_minutes() -> None:
    run = Run(0.1, 0.1)
    stuck(run)(0)
    assert run.suspects_of_a_stall(298) == ()
    assert [one.rank for one in run.suspects_of_a_stall(4)] == [0]


def test_while_the_run_does_not_train_all_may_wait_for_rank_0() -> None:
    run = Run(0.1, 0.1)
    run.steps(20)
    stuck(run)(0)
    for _ in range(1_000):
        assert run.look(1.0, is_training=False).suspects == ()


def test_evidence_is_kept_before_ranks_that_hang_end_themselves() -> None:
    run = Run(0.1, 0.1)
    run.judge = Judge(SlowPace(), StuckPace(most_seconds=5))
    run.steps(20)
    stuck(run)(0)
    assert [one.rank for one in run.suspects_of_a_stall(7)] == [0]


def test_at_most_five_are_named_the_stuck_ones_first() -> None:
    run = Run(*[0.1] * 40, *[0.3] * 7)
    until_named(run, 60)
    assert [one.rank for one in run.step().suspects] == [40, 41, 42, 43, 44]
    stuck(run)(7)
    assert [one.rank for one in run.suspects_of_a_stall(33)] == [7, 40, 41, 42, 43]


def test_a_single_rank_holds_nobody_back() -> None:
    run = Run(1.0)
    assert run.steps(30).suspects == ()
    assert run.suspects_of_a_stall(400) == ()


def dump(**changes: Any) -> bytes:
    """Return what torch's recorder answers, with two groups of which one is of checkpoints."""
    status = {"last_enqueued_collective": "7", "last_completed_collective": "6"}
    entry = {"pg_id": 2, "process_group": ["9", "checkpoint"]}
    known = {"version": "2.10", "pg_status": {"0": status, "2": status}, "entries": [entry]}
    return json.dumps(known | changes).encode()


def test_the_recorder_tells_how_many_collectives_of_training_have_begun() -> None:
    assert num_begun(dump()) == 7
    assert num_begun(dump(entries=[])) == 14


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(dump()[:-9], id="cut off"),
        pytest.param(b"[1]", id="a list"),
        pytest.param(dump(pg_status=[]), id="groups in a list"),
        pytest.param(dump(pg_status={"0": {"enqueued": 3}}), id="other words"),
        pytest.param(dump(entries=[{"group": 1}]), id="other entries"),
        pytest.param(dump(pg_status={}), id="no groups"),
    ],
)
def test_a_recorder_of_another_version_tells_nothing(text: bytes) -> None:
    assert num_begun(text) is None

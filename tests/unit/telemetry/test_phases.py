"""The clock of a rank's phases: at any moment they sum to the time that passed, and none falls."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune_trainer.config.metrics import PHASE_SECONDS, TimedPhase
from finetune_trainer.telemetry import Lap
from finetune_trainer.telemetry.node.node_ranks import NodeRanks
from finetune_trainer.telemetry.phases import PhaseClock, read_phases, running_phase
from finetune_trainer.telemetry.processes import TICK_SECONDS, seconds_since_start
from finetune_trainer.telemetry.slots import Block, layout_of_node
from support.launch.launches import until

FORWARD, BACKWARD, OTHER = TimedPhase.FORWARD, TimedPhase.BACKWARD, TimedPhase.OTHER
WAITING, LOGGING = TimedPhase.COMM_EXPOSED, TimedPhase.LOGGING
MOMENT = 1e-6  # what doubles keep of a sum, in seconds
Phases = dict[TimedPhase, float]


class Bench:
    """A clock whose time passes when a test says so, and what its page would show."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.block = Block.private()
        self.clock = PhaseClock(self.block, lambda: self.now)
        self._began = self.now - self._sum()
        self._before = self._read()

    def wait(self, seconds: float, phase: TimedPhase | None = None) -> None:
        if phase is not None:
            self.clock.enter(phase)
        self.now += seconds

    def gained(self) -> dict[str, float]:
        """Return what each phase has got since the bench was made, where that is anything."""
        gains = {phase.value: now - self._before[phase] for phase, now in self._read().items()}
        return {name: gain for name, gain in gains.items() if gain > MOMENT}

    def check(self, before: Phases) -> Phases:
        """Expect that no phase has less than before, and that they sum to the wall time."""
        phases = self._read()
        assert all(phases[one] >= before[one] for one in phases)
        assert sum(phases.values()) == pytest.approx(self.now - self._began, abs=MOMENT)
        return phases

    def _read(self) -> Phases:
        return read_phases(self.block.snapshot(), self.now)

    def _sum(self) -> float:
        return sum(self._read().values())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_every_phase_of_the_catalogue_is_one_of_the_clock() -> None:
    places = {phase: layout_of_node().place(PHASE_SECONDS, phase.value) for phase in TimedPhase}
    assert len(set(places.values())) == len(TimedPhase)


def test_a_rank_begins_in_other_with_the_start_of_its_process() -> None:
    block, before = Block.private(), seconds_since_start()
    PhaseClock(block)
    phases = read_phases(block.snapshot(), time.monotonic())
    assert before <= phases.pop(OTHER) <= seconds_since_start() + TICK_SECONDS
    assert set(phases.values()) == {0.0}


def test_the_phase_that_runs_counts_up_to_the_moment_it_is_read(bench: Bench) -> None:
    bench.wait(1, FORWARD)
    bench.wait(2, BACKWARD)
    assert bench.gained() == pytest.approx({"forward": 1, "backward": 2})
    bench.wait(3)
    assert bench.gained() == pytest.approx({"forward": 1, "backward": 5})


def test_a_phase_within_another_returns_to_it_also_when_something_is_raised(bench: Bench) -> None:
    bench.wait(1, BACKWARD)

    def lose() -> None:
        with bench.clock.within(WAITING):
            bench.wait(2)
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        lose()
    bench.wait(4)
    assert bench.gained() == pytest.approx({"backward": 5, "comm_exposed": 2})
    assert bench.clock.enter(FORWARD) is BACKWARD


def test_nothing_is_counted_after_the_end(bench: Bench) -> None:
    bench.wait(1, FORWARD)
    bench.clock.stop()
    bench.wait(2)
    bench.wait(4, BACKWARD)
    bench.clock.stop()
    assert bench.gained() == pytest.approx({"forward": 1})


def test_time_that_was_of_another_phase_is_made_up_for_and_no_counter_falls(bench: Bench) -> None:
    """As DDP tells after each step what of the backward pass it had waited for."""
    seen = bench.check(dict.fromkeys(TimedPhase, 0.0))
    for _ in range(50):
        bench.wait(0.3, FORWARD)
        seen = bench.check(seen)
        bench.wait(0.7, BACKWARD)
        seen = bench.check(seen)
        bench.clock.move(BACKWARD, WAITING, 0.4)
        bench.wait(0.1, LOGGING)
        seen = bench.check(seen)
    told = {"forward": 15, "backward": 15, "comm_exposed": 20, "logging": 5}
    assert bench.gained() == pytest.approx(told, abs=1)  # a step takes 1.1


def test_a_rank_that_is_stuck_in_a_phase_is_seen_in_it_whatever_is_owed(bench: Bench) -> None:
    bench.wait(5, BACKWARD)
    bench.clock.enter(LOGGING)
    bench.clock.move(BACKWARD, WAITING, 3)
    bench.wait(100, BACKWARD)
    numbers = bench.block.snapshot()
    assert running_phase(numbers) == (BACKWARD, bench.now - 100)
    assert bench.gained() == pytest.approx({"backward": 102, "comm_exposed": 3})
    bench.wait(1, FORWARD)
    told = {"backward": 102, "comm_exposed": 3, "forward": 1}
    assert bench.gained() == pytest.approx(told)
    bench.clock.stop()
    assert running_phase(bench.block.snapshot()) is None
    assert bench.gained() == pytest.approx(told)


class Device:
    """Works off what it is asked, in order, as a GPU does."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.free_at = 0.0

    def mark(self) -> float:
        self.free_at = max(self.free_at, self._bench.now)
        return self.free_at

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier


@pytest.mark.parametrize(
    ("data_seconds", "told"),
    [
        pytest.param(0.1, {"forward": 0.4, "backward": 0.6}, id="the device is always busy"),
        pytest.param(
            1.2, {"data_wait": 0.21, "forward": 0.4, "backward": 0.6}, id="it waits for data"
        ),
    ],
)
def test_phases_are_those_of_the_device_which_comes_to_them_later(
    bench: Bench, data_seconds: float, told: dict[str, float]
) -> None:
    device, steps = Device(bench), 100
    bench.clock.follow(device)
    seen = bench.check(dict.fromkeys(TimedPhase, 0.0))
    in_flight = None
    for _ in range(steps):
        bench.wait(data_seconds, TimedPhase.DATA_WAIT)
        bench.wait(0.005, FORWARD)
        device.free_at += 0.4
        bench.wait(0.005, BACKWARD)
        device.free_at += 0.6
        seen = bench.check(seen)
        bench.clock.enter(LOGGING)
        if in_flight is not None:
            arrived, marks = in_flight
            bench.now = max(bench.now, arrived)
            bench.clock.count(marks)
        in_flight = device.free_at, bench.clock.take_marks()
        seen = bench.check(seen)
        bench.clock.enter(OTHER)
    gained = bench.gained()
    of_a_step = {phase.value: gained.get(phase.value, 0) / steps for phase in TimedPhase}
    none = dict.fromkeys(TimedPhase, 0.0)
    assert of_a_step == pytest.approx(none | told, abs=3 / steps)  # told within 3 steps


def test_the_times_of_a_step_lose_nothing_between_two_steps(bench: Bench) -> None:
    lap = Lap(bench.clock)
    bench.wait(1, TimedPhase.DATA_WAIT)
    bench.wait(2, FORWARD)
    bench.clock.enter(LOGGING)
    first = lap.ended()
    bench.wait(4, TimedPhase.EVAL)
    bench.wait(8, TimedPhase.CHECKPOINT_BLOCKING)
    bench.wait(32, TimedPhase.PROFILING)
    bench.wait(16, FORWARD)
    bench.clock.enter(LOGGING)
    names = ("seconds", "data_wait_seconds", "checkpoint_blocking_seconds", "profiling_seconds")
    assert first == pytest.approx(dict(zip(names, (3, 1, 0, 0), strict=True)))
    assert lap.ended() == pytest.approx(dict(zip(names, (24, 0, 8, 32), strict=True)))


def test_a_listener_is_called_with_each_phase_until_it_is_removed(bench: Bench) -> None:
    heard: list[TimedPhase] = []
    bench.clock.enter(FORWARD)
    bench.clock.listen(heard.append)
    with bench.clock.within(LOGGING):
        pass
    bench.clock.listen(None)
    bench.clock.enter(LOGGING)
    assert heard == [LOGGING, FORWARD]


SWITCH_FOR_EVER = """
import sys
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.telemetry.shared import NodePage, Shared
phases = Shared(NodePage(folder=sys.argv[1]), 0).phases
if sys.argv[2] == "owing":
    phases.move(TimedPhase.FORWARD, TimedPhase.COMM_EXPOSED, 1e-3)
while True:
    for phase in TimedPhase:
        phases.enter(phase)
        sum(range(1000))  # else it would be in no phase for long enough to be read
"""


@pytest.mark.parametrize("how", ["as they come", "owing"])
def test_another_process_never_sees_half_a_switch_nor_a_fall_over_a_restart(
    tmp_path: Path, how: str
) -> None:
    ranks = NodeRanks(tmp_path, range(1))
    seen: list[Phases] = [dict.fromkeys(TimedPhase, 0.0)]

    def look() -> tuple[float, float, float]:
        before = time.monotonic()
        (rank,) = ranks.now()
        phases = dict(rank.phase_seconds)
        assert all(phases[one] >= seen[-1][one] for one in TimedPhase)
        seen.append(phases)
        return before, sum(phases.values()), time.monotonic()

    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", SWITCH_FOR_EVER, str(tmp_path), how])
        try:
            until(lambda: any(rank.resident_bytes is not None for rank in ranks.now()))
            began = look()
            for _ in range(2000):
                ended = look()
            grown = ended[1] - began[1]
            # A writer that is preempted in a switch has looked at the clock before it shows so.
            assert 0.9 * (ended[0] - began[2]) <= grown <= 1.1 * (ended[2] - began[0])
        finally:
            writer.kill()
            writer.wait()
        assert look()[1] == look()[1]
    assert all(seconds > 0 for seconds in seen[-1].values())

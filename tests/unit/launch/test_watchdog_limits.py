"""How long a rank may report nothing, and how it is ended, also while it holds Python's lock."""

import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch

from finetune_trainer.config import FailureClass, Phase, Termination
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.launch.stacks import stacks_file, stacks_of_timer
from finetune_trainer.model.compiler import report_compilations
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.watchdog import (
    DEFAULT_HANG_SECONDS,
    LEAST_HANG_SECONDS,
    Limit,
    limit_of,
    watch_progress,
)
from support.launch.launches import train_config
from support.launch.rank_entries import report, wait_with_the_lock
from support.launch.warm_processes import forkserver

OF_STEPS = Limit(0.5, is_of_steps=True)


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[Telemetry]:
    opened = Telemetry(train_config(tmp_path), rank=0, world_size=1)
    yield opened
    opened.close()


class Watched:
    """What a watchdog has come to."""

    def __init__(self, telemetry: Telemetry, stacks: Path, limit: Limit = OF_STEPS) -> None:
        self._ended = Event()
        self.how: Termination | None = None
        watch_progress(telemetry, limit, stacks, self._end)

    def has_ended(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def _end(self, termination: Termination) -> None:
        self.how = termination
        self._ended.set()


def test_on_gpus_there_is_a_limit_for_steps_where_nobody_has_set_one(tmp_path: Path) -> None:
    config = train_config(tmp_path, world={"device": "cuda"})
    assert limit_of(config) == (DEFAULT_HANG_SECONDS, True, LEAST_HANG_SECONDS)
    assert config.control.collective_timeout_seconds > DEFAULT_HANG_SECONDS
    assert limit_of(train_config(tmp_path)) is None
    asked = train_config(tmp_path, world={"device": "cuda"}, control={"hang_seconds": 7})
    assert limit_of(asked) == (7, False, None)


def test_steps_that_stay_away_end_the_rank_with_its_stacks(
    telemetry: Telemetry, tmp_path: Path
) -> None:
    telemetry.phase(Phase.TRAINING)
    telemetry.step(report(1))
    watched = Watched(telemetry, tmp_path / "stacks")
    assert watched.has_ended(30)
    assert watched.how is not None
    assert watched.how.failure_class is FailureClass.HUNG
    assert "in has_ended" in (tmp_path / "stacks").read_text()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param([1.0] * 9, 900, id="too few steps"),
        pytest.param([1.0] * 10, 300, id="fast steps"),
        pytest.param([20.0] * 9 + [600.0], 400, id="a slow step among them"),
        pytest.param([100.0] * 10, 900, id="slow steps"),
        pytest.param([100.0] * 50 + [20.0] * 100, 400, id="the last hundred"),
    ],
)
def test_the_default_limit_is_twenty_steps_between_five_and_fifteen_minutes(
    seconds: list[float], expected: float, telemetry: Telemetry, tmp_path: Path
) -> None:
    limit = limit_of(train_config(tmp_path, world={"device": "cuda"}))
    assert limit is not None
    for step, duration in enumerate(seconds, start=1):
        telemetry.step(report(step)._replace(seconds=duration))
    assert telemetry.progress.step == len(seconds)
    assert limit.current(telemetry) == expected


def test_a_rank_whose_fast_steps_stop_is_ended_before_the_highest_limit(
    telemetry: Telemetry, tmp_path: Path
) -> None:
    telemetry.phase(Phase.TRAINING)
    for step in range(1, 11):
        telemetry.step(report(step)._replace(seconds=0.001))
    watched = Watched(telemetry, tmp_path / "stacks", Limit(300.0, True, least_seconds=0.5))
    assert watched.has_ended(30)


def test_a_recompilation_may_take_longer(telemetry: Telemetry, tmp_path: Path) -> None:
    telemetry.phase(Phase.TRAINING)
    telemetry.step(report(1))
    telemetry.compiling(True)
    watched = Watched(telemetry, tmp_path / "stacks")
    assert not watched.has_ended(3 * OF_STEPS.seconds)
    telemetry.compiling(False)
    assert watched.has_ended(30)


def test_torch_reports_when_it_compiles() -> None:
    seen: list[bool] = []
    report_compilations(seen.append)
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    double(torch.ones(2))
    assert seen == [True, False]
    double(torch.ones(2))
    double(torch.ones(3))
    assert seen == [True, False] * 2


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.TRAINING, Phase.ANSWERING, Phase.EXPORTING])
def test_what_comes_before_and_after_steps_may_take_longer(
    phase: Phase, telemetry: Telemetry, tmp_path: Path
) -> None:
    telemetry.phase(phase)  # of training the first step, in which kernels are compiled
    assert not Watched(telemetry, tmp_path / "stacks").has_ended(3 * OF_STEPS.seconds)


@pytest.mark.parametrize(
    "phase", [TimedPhase.EVAL, TimedPhase.CHECKPOINT_BLOCKING, TimedPhase.PROFILING]
)
def test_what_a_step_waits_for_may_take_longer_and_is_forgotten_behind_it(
    phase: TimedPhase, telemetry: Telemetry, tmp_path: Path
) -> None:
    telemetry.phase(Phase.TRAINING)
    telemetry.step(report(1))
    with telemetry.phases.within(phase):
        watched = Watched(telemetry, tmp_path / "stacks")
        assert not watched.has_ended(3 * OF_STEPS.seconds)
    assert not watched.has_ended(OF_STEPS.seconds / 2)
    assert watched.has_ended(30)


def hold_the_lock(folder: Path) -> None:
    """Make a step, and then wait in C for what never comes, with the interpreter lock."""
    config = train_config(folder)
    telemetry = Telemetry(config, rank=0, world_size=1)
    telemetry.phase(Phase.TRAINING)
    telemetry.step(report(1))
    watching = threading.Event()
    limit = Limit(1.0, is_of_steps=True)
    watch_progress(telemetry, limit, folder / stacks_file(0), lambda _: watching.set())
    watching.wait(limit.seconds / 2)  # so that the watchdog has set its timer
    wait_with_the_lock()


def test_a_rank_that_holds_the_interpreter_lock_is_ended_with_its_stacks(tmp_path: Path) -> None:
    process = forkserver().Process(target=hold_the_lock, args=(tmp_path,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 1
    stacks, reports = tmp_path / stacks_file(0), tmp_path / "reports"
    reports.mkdir()
    assert stacks_of_timer(reports, 0) is None
    (reports / stacks.name).symlink_to(stacks)
    assert stacks_of_timer(reports, 0) == stacks
    assert "in hold_the_lock" in stacks.read_text()
    stacks.write_text("no progress for 1 s\n")
    assert stacks_of_timer(reports, 0) is None

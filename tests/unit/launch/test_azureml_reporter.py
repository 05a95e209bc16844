"""The reporter of an Azure ML run, turn by turn: what it sends, when, and what is refused."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from finetune_trainer.config import (
    HEARD_TAG,
    PROGRESS_TAG,
    STOP_TAG,
    CheckpointRef,
    Heard,
    Progress,
)
from finetune_trainer.control import StopSignal
from finetune_trainer.launch.azureml.curves import MAX_POINTS, Curves
from finetune_trainer.launch.azureml.mlflow_run import NotReportedError, RefusedError
from finetune_trainer.launch.azureml.reporter import (
    SECONDS_BETWEEN_POLLS,
    SECONDS_BETWEEN_REPORTS,
    RemoteRun,
    Reporter,
)
from finetune_trainer.launch.journal_points import Point
from finetune_trainer.telemetry import StepReport, Telemetry
from support.launch.launches import train_config

SENTENCE = "the service is away"


class FakeRun:
    """A run of which a test says what it answers.

    Attributes:
        said: Its tags.
        error: What every request raises, if anything.
        looks: How often the tags were asked for.
        reports: What was reported, refused reports included.
    """

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.error: Exception | None = None
        self.looks = 0
        self.reports: list[tuple[Sequence[Point], Mapping[str, str]]] = []

    def tags(self) -> Mapping[str, str]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.said

    def report(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        self.reports.append((points, tags))
        if self.error is not None:
            raise self.error

    def steps(self, report: int) -> list[int]:
        return [point.step for point in self.reports[report][0]]

    def progress(self, report: int) -> Progress:
        return Progress.model_validate_json(self.reports[report][1][PROGRESS_TAG])


class World:
    """Rank 0's own telemetry, and the reporter that reads what it writes."""

    def __init__(self, folder: Path) -> None:
        self.config = train_config(folder)
        self.now = 1000.0
        self.log: list[str] = []
        self.stop = StopSignal()
        self.run = FakeRun()
        self.reporter = self.new_reporter()
        self.telemetry = Telemetry(self.config, rank=0, world_size=2, clock=lambda: self.now)

    def new_reporter(self, error: Exception | None = None) -> Reporter:
        def open_run() -> RemoteRun:
            if error is not None:
                raise error
            return self.run

        return Reporter(
            self.config, self.stop, open_run, clock=lambda: self.now, log=self.log.append
        )

    def step(self, number: int, loss: float | None = 0.5) -> None:
        self.now += 1
        self.telemetry.step(
            StepReport(
                step=number,
                epoch=0.1,
                loss=loss,
                grad_norm=1.5,
                learning_rate=1e-3,
                tokens=100,
                samples=4,
                seconds=2.0,
            )
        )

    def checkpoint(self, step: int) -> None:
        path = str(Path(self.config.checkpoint.dir) / f"step-{step}.claim")
        self.telemetry.checkpointed(
            CheckpointRef(step=step, path=path, time=self.now, world_size=2)
        )

    def turn(self, now: float) -> None:
        self.reporter.turn(self.run, now)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.telemetry.close()


def test_one_report_has_curves_progress_and_that_it_listens(world: World) -> None:
    world.telemetry.log("claimed", generation=2)
    world.telemetry.evaluated(0, 0.75, 1.0)
    world.step(1)
    world.turn(0)
    [(points, tags)] = world.run.reports
    assert [(point.step, point.values) for point in points] == [
        (0, {"eval/loss": 0.75}),
        (
            1,
            {
                "train/loss": 0.5,
                "train/grad_norm": 1.5,
                "train/learning_rate": 1e-3,
                "train/tokens_per_second": 50.0,
            },
        ),
    ]
    assert [point.time for point in points] == [1000.0, 1001.0]
    assert world.run.progress(0).step == 1
    heard = Heard.model_validate_json(tags[HEARD_TAG])
    assert heard == Heard(time=1001.0, starts=2)


def test_before_rank_0_has_said_anything_it_says_that_it_listens(tmp_path: Path) -> None:
    config, run = train_config(tmp_path), FakeRun()
    Reporter(config, StopSignal(), lambda: run, clock=lambda: 7.0).turn(run, 0)
    [(points, tags)] = run.reports
    assert (points, set(tags)) == ([], {HEARD_TAG})


def test_steps_wait_for_the_next_report_and_a_checkpoint_does_not(world: World) -> None:
    world.step(1)
    for now in range(0, int(SECONDS_BETWEEN_REPORTS) * 2, 3):
        world.turn(now)
        world.step(now + 2)
    assert len(world.run.reports) == 2
    world.checkpoint(2)
    world.turn(SECONDS_BETWEEN_REPORTS * 2 - 2)
    saved = world.run.progress(2).checkpoint
    assert saved is not None
    assert saved.path == "step-2.claim"
    world.turn(SECONDS_BETWEEN_REPORTS * 2 - 1)
    assert len(world.run.reports) == 3


def test_each_point_is_sent_once(world: World) -> None:
    world.step(1)
    world.step(2)
    world.turn(0)
    world.step(3)
    world.turn(SECONDS_BETWEEN_REPORTS)
    assert [world.run.steps(0), world.run.steps(1)] == [[1, 2], [3]]


def test_what_is_no_number_is_left_out(world: World) -> None:
    world.step(1, loss=float("nan"))
    world.turn(0)
    [point] = world.run.reports[0][0]
    assert set(point.values) == {
        "train/grad_norm",
        "train/learning_rate",
        "train/tokens_per_second",
    }


def test_an_outage_is_said_once_and_its_end_once(world: World) -> None:
    world.run.error = OSError(SENTENCE)
    for turn in range(4):
        world.step(turn + 1)
        world.turn(turn * SECONDS_BETWEEN_REPORTS)
    assert world.log == [
        f"warning: Azure ML does not accept the reports of this run ({SENTENCE}); "
        "training continues"
    ]
    world.run.error = None
    world.step(5)
    for turn in range(4, 7):
        world.turn(turn * SECONDS_BETWEEN_REPORTS)
    assert world.log[1:] == ["Azure ML accepts the reports of this run again"]
    assert world.run.steps(4) == [1, 2, 3, 4, 5]
    assert world.run.progress(4).step == 5


def test_of_a_long_error_the_end_is_told(world: World) -> None:
    world.run.error = OSError("https://address/" + "x" * 500 + " (Caused by a time-out)\nmore")
    world.turn(0)
    [line] = world.log
    assert "(...xxx" in line
    assert line.endswith("x (Caused by a time-out)); training continues")


def test_where_only_reports_are_refused_it_is_said_once(world: World) -> None:
    class Half(FakeRun):
        def tags(self) -> Mapping[str, str]:
            return {}

    world.run = Half()
    world.run.error = PermissionError(SENTENCE)
    for turn in range(4):
        world.turn(turn * SECONDS_BETWEEN_REPORTS)
    assert len(world.log) == 1


class RefusesPoints(FakeRun):
    def report(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        super().report(points, tags)
        if points:
            raise RefusedError(SENTENCE)


def test_points_that_are_refused_do_not_keep_progress_from_the_service(world: World) -> None:
    world.run = RefusesPoints()
    world.step(1)
    world.turn(0)
    world.turn(SECONDS_BETWEEN_REPORTS)
    assert [world.run.steps(report) for report in range(3)] == [[1], [], []]
    assert world.run.progress(1).step == 1
    assert [SENTENCE in line for line in world.log] == [True, False]


def test_where_everything_is_refused_the_points_are_kept(world: World) -> None:
    world.run.error = RefusedError(SENTENCE)
    world.step(1)
    world.turn(0)
    world.run.error = None
    world.turn(SECONDS_BETWEEN_REPORTS)
    assert world.run.steps(-1) == [1]


def test_a_long_outage_thins_the_curves_and_keeps_their_ends_and_evaluations(
    world: World,
) -> None:
    world.turn(0)
    world.telemetry.evaluated(0, 0.75, 1.0)
    last = 10 * MAX_POINTS + 3
    for number in range(1, last + 1):
        world.step(number)
        if number % 100 == 0:
            world.turn(1)  # nothing is due
    world.turn(SECONDS_BETWEEN_REPORTS)
    steps = [point.step for point in world.run.reports[-1][0]]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, last)
    assert MAX_POINTS / 2 <= len(steps) <= MAX_POINTS + 2
    gaps = {after - before for before, after in pairwise(steps[1:-1])}
    assert len(gaps) == 1, "the curve is as coarse at its begin as at its end"


def test_the_curve_is_whole_again_after_an_outage(world: World) -> None:
    for number in range(1, 3 * MAX_POINTS):
        world.step(number)
    world.turn(0)
    for number in range(3 * MAX_POINTS, 3 * MAX_POINTS + 20):
        world.step(number)
    world.turn(SECONDS_BETWEEN_REPORTS)
    assert world.run.steps(1) == list(range(3 * MAX_POINTS, 3 * MAX_POINTS + 20))


def test_the_stop_tag_stops_as_a_signal_does_and_ends_the_looking(world: World) -> None:
    world.turn(0)
    assert not world.stop.requested
    world.run.said[STOP_TAG] = '{"until": "2026-11-23T16:00:00Z"}'
    world.turn(SECONDS_BETWEEN_POLLS - 1)
    assert not world.stop.requested
    world.turn(SECONDS_BETWEEN_POLLS)
    assert world.stop.reason == "the tag finetune.stop"
    world.turn(10 * SECONDS_BETWEEN_POLLS)
    assert world.run.looks == 2
    assert world.log == ["the tag finetune.stop requests a stop"]


def test_the_end_is_reported_though_the_run_directory_is_gone(world: World) -> None:
    with world.reporter:
        world.step(1)
        world.checkpoint(1)
        world.telemetry.close()
    Path(world.config.run_dir).rename(Path(world.config.run_dir).with_name("gone"))
    world.reporter.wait(60)
    assert world.run.progress(-1).checkpoint is not None
    sent = [point.step for points, _ in world.run.reports for point in points]
    assert sent == [1]


def test_a_run_that_cannot_be_reached_is_said_in_one_line(world: World) -> None:
    reporter = world.new_reporter(NotReportedError("azureml-mlflow cannot be imported; install it"))
    with reporter:
        reporter.wait(60)
    assert world.log == [
        "warning: azureml-mlflow cannot be imported; install it; without it Studio draws no "
        "curves, the job's status has no progress, and a stop without SIGTERM costs the steps "
        "since the last checkpoint; training continues"
    ]


@pytest.mark.parametrize("fails", ["open", "report"])
def test_after_the_end_nothing_follows_the_last_words(world: World, fails: str) -> None:
    has_ended = threading.Event()

    def open_run() -> RemoteRun:
        has_ended.wait()
        if fails == "open":
            raise NotReportedError(SENTENCE)
        return world.run

    world.run.error = OSError(SENTENCE)
    reporter = Reporter(world.config, world.stop, open_run, log=world.log.append)
    with reporter:
        pass
    has_ended.set()
    reporter.wait(60)
    assert world.log == []


def test_what_an_earlier_start_left_in_the_folder_is_not_reported(world: World) -> None:
    world.step(1)
    world.now += 1
    world.reporter = world.new_reporter()
    world.turn(0)
    assert world.run.reports[-1][0] == []
    assert set(world.run.reports[-1][1]) == {HEARD_TAG}


def test_the_next_start_of_an_attempt_continues_its_curves(world: World) -> None:
    world.step(1)
    world.telemetry.close()
    world.telemetry = Telemetry(
        world.config, rank=0, world_size=2, clock=lambda: world.now, generation=2
    )
    world.step(2)
    world.turn(0)
    assert world.run.steps(0) == [1, 2]


def test_half_a_line_waits_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    journal = tmp_path / "run/logs/attempt-1.1/rank-0.jsonl"
    curves = Curves(train_config(tmp_path))
    journal.parent.mkdir(parents=True)
    line = json.dumps({"event": "evaluated", "step": 1, "time": 1.0, "loss": 0.5}) + "\n"
    journal.write_text('{"event": "evalua\n5\n' + line[:20])
    curves.read()
    assert curves.points == []
    with journal.open("a") as file:
        file.write(line[20:])
    curves.read()
    assert [point.step for point in curves.points] == [1]

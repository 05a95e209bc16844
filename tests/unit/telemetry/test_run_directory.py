"""A process of an earlier attempt does not write to a run directory that has a new owner."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from finetune_trainer.claims.enter import Pace, Wanted
from finetune_trainer.claims.fence import Fence, take
from finetune_trainer.config import SUSPECTS_FILE, JobRef, Phase, Progress, Suspects
from finetune_trainer.errors import OvertakenError
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.telemetry.node.node_ranks import NodeRanks
from finetune_trainer.telemetry.node.node_watch import NodeWatch, WatchConfig
from support.launch.journals import journal_in
from support.launch.launches import train_config


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Attempt:
    """Rank 0 of an attempt: its claim on the run directory, and its telemetry."""

    def __init__(self, folder: Path, number: int, uid: str = "uid-a") -> None:
        self.run_dir = folder / "run"
        job = JobRef(name="tiny", uid=uid, attempt=number)
        wanted = Wanted(self.run_dir, "the run directory", job, take_over=True)
        holding = take([wanted], lambda _: Pace()).holding(self.run_dir)
        self.clock = Clock()
        self.fence = Fence([holding], self.clock)
        self.fence.check()
        self._config = train_config(folder, job=job.model_dump())
        self.telemetry = self.open_telemetry()

    def open_telemetry(self) -> Telemetry:
        return Telemetry(self._config, rank=0, world_size=1, check=self.fence.check_if_older)

    @property
    def events(self) -> list[str]:
        attempt = self._config.job.attempt
        return [one["event"] for one in journal_in(self.run_dir) if one["attempt"] == attempt]


def progress_in(folder: Path) -> tuple[int, Phase]:
    found = Progress.read(folder / "run" / "progress.json")
    return found.attempt, found.phase


Start = Callable[..., Attempt]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as at_end:

        def start(number: int, phase: Phase, uid: str = "uid-a") -> Attempt:
            attempt = Attempt(tmp_path, number, uid)
            at_end.callback(attempt.telemetry.close)
            attempt.telemetry.phase(phase)
            return attempt

        yield start


@pytest.fixture
def first(start: Start) -> Attempt:
    return start(1, Phase.TRAINING)


def test_the_progress_of_a_later_attempt_is_not_replaced(
    start: Start, first: Attempt, tmp_path: Path
) -> None:
    start(2, Phase.LOADING)
    first.telemetry.phase(Phase.EXPORTING)
    first.telemetry.close()
    assert progress_in(tmp_path) == (2, Phase.LOADING)


def test_after_a_pause_the_claims_are_checked_before_each_write(
    first: Attempt, tmp_path: Path
) -> None:
    before = first.events
    second = JobRef(name="tiny", uid="uid-a", attempt=2)
    take([Wanted(first.run_dir, "the run directory", second)], lambda _: Pace())
    first.clock.now += 11
    first.telemetry.phase(Phase.EXPORTING)
    first.telemetry.close()
    assert first.events == before
    assert progress_in(tmp_path) == (1, Phase.TRAINING)
    with pytest.raises(OvertakenError, match="attempt 2 now writes to"):
        first.open_telemetry()


def test_after_a_pause_without_a_successor_the_attempt_continues(
    first: Attempt, tmp_path: Path
) -> None:
    first.clock.now += 3600
    first.telemetry.phase(Phase.EVALUATING)
    assert progress_in(tmp_path) == (1, Phase.EVALUATING)


def test_a_job_that_takes_over_replaces_the_progress_of_a_higher_attempt(
    start: Start, tmp_path: Path
) -> None:
    start(3, Phase.TRAINING)
    start(1, Phase.LOADING, "uid-b")
    assert progress_in(tmp_path) == (1, Phase.LOADING)


@pytest.mark.parametrize(("owner", "is_deleted"), [(1, True), (2, False)])
def test_the_page_of_an_earlier_attempt_leaves_the_suspects_alone(
    start: Start, tmp_path: Path, owner: int, is_deleted: bool
) -> None:
    attempt = start(owner, Phase.TRAINING)
    suspects = attempt.run_dir / SUSPECTS_FILE
    suspects.write_text(Suspects(attempt=owner).to_json())
    config = WatchConfig(run_dir=str(attempt.run_dir), attempt=1, node="a", num_nodes=1, word="w")
    others = set(threading.enumerate())
    NodeWatch(config, NodeRanks(tmp_path, [0]), tmp_path).look()
    for thread in set(threading.enumerate()) - others:
        thread.join()
    assert suspects.exists() != is_deleted

"""Live trainers that meet in one folder: the later attempt trains, another job is refused."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.checkpoint.commit import ledger, verify
from finetune_trainer.config import ExitCode, FailureClass, JobRef, Progress, TrainConfig
from support.checkpoint.lagging_layer import LaggingLayer, lagging_layer
from support.launch.forked_ranks import Ranks, events
from support.launch.launches import train_config, until
from support.launch.tiny_run import write_inputs

LAG_SECONDS = 0.05
LEAVE_SECONDS = 10.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaggingLayer]:
    with lagging_layer(tmp_path_factory.mktemp("layer"), lag_seconds=LAG_SECONDS) as mounted:
        yield mounted


class Trainers:
    """Attempts of jobs, which all write into one place."""

    def __init__(self, inputs: Path, beside: Path, place: Path, lag_seconds: float) -> None:
        self._inputs, self._beside, self.place = inputs, beside, place
        self._lag_seconds = lag_seconds
        self._started: list[Ranks] = []

    def config(self, uid: str = "uid-a", attempt: int = 1, **changes: Any) -> TrainConfig:
        """Return the configuration of an attempt that trains until it is ended."""
        folder = self._beside / f"{uid}-{attempt}-{len(self._started)}"
        folder.mkdir()
        values: dict[str, Any] = {
            "job": {"name": uid.partition("-")[2], "uid": uid, "attempt": attempt},
            "world": {"nproc_per_node": 1},
            "model": {"path": str(self._inputs / "model")},
            "data": {"train": {"path": str(self._inputs / "train.jsonl")}},
            "training": {"max_steps": 10**6, "learning_rate": 1e-3},
            "checkpoint": {
                "dir": str(self.place / "checkpoints"),
                "every_steps": 3,
                "is_continued": attempt > 1,
            },
            "output": {"dir": str(self.place / "output")},
            "run_dir": str(self.place / "run"),
            "listing_lag_seconds": self._lag_seconds,
        }
        for name, value in changes.items():
            known = values.get(name)
            values[name] = {**known, **value} if isinstance(value, dict) and known else value
        return train_config(folder, **values)

    def start(self, config: TrainConfig) -> Ranks:
        self._started.append(Ranks(config))
        return self._started[-1]

    def train(self, *arguments: Any, **changes: Any) -> Ranks:
        """Start an attempt, and return when it has committed a checkpoint of its own."""
        ranks = self.start(self.config(*arguments, **changes))
        until(lambda: self.has_committed(ranks))
        return ranks

    def has_committed(self, ranks: Ranks) -> bool:
        assert ranks.processes[0].is_alive(), "it ended"
        job, config = ranks.config.job, ranks.config
        newest = [e for e in events(config) if e["attempt"] == job.attempt]
        return any(event["event"] == "checkpointed" for event in newest)

    @property
    def root(self) -> Path:
        return self.place / "checkpoints"

    def end(self) -> None:
        for ranks in self._started:
            for process in ranks.processes:
                process.kill()
                process.join()


@pytest.fixture
def trainers(inputs: Path, tmp_path: Path) -> Iterator[Trainers]:
    """On a plain folder."""
    (tmp_path / "place").mkdir()
    made = Trainers(inputs, tmp_path, tmp_path / "place", 0.0)
    yield made
    made.end()


@pytest.fixture
def lagging(
    inputs: Path, tmp_path: Path, layer: LaggingLayer, request: pytest.FixtureRequest
) -> Iterator[Trainers]:
    """On the layer whose listings lag."""
    place = layer.root / request.node.name
    place.mkdir()
    made = Trainers(inputs, tmp_path, place, LAG_SECONDS)
    yield made
    made.end()


def leave_overtaken(ranks: Ranks, since: float) -> str:
    """Wait until an overtaken attempt has left as it should, and return what it says."""
    codes = ranks.codes()
    seconds = time.monotonic() - since
    assert codes[0] == ExitCode.DO_NOT_RESTART
    assert all(codes), "a rank ended as if nothing had been"
    assert seconds < LEAVE_SECONDS + 10  # of which it may be told of late on a busy machine
    words = ranks.termination()
    assert words.failure_class is FailureClass.OVERTAKEN
    return words.message


def go_on(trainers: Trainers, later: Ranks) -> None:
    """See that the later attempt began no earlier than what had been reported, and goes on."""
    until(lambda: trainers.has_committed(later))
    told, attempt = events(later.config), later.config.job.attempt
    saved = [event for event in told if event["event"] == "checkpointed"]
    before = [one["checkpoint"]["step"] for one in saved if one["attempt"] < attempt]
    resumed = [one for one in told if one["event"] == "resumed" and one["attempt"] == attempt]
    assert [one["step"] for one in resumed] == [max(before)]
    later.processes[0].terminate()
    assert later.codes() == [ExitCode.PREEMPTED]
    refs = ledger(trainers.root)
    assert refs[0].step == later.termination().step
    for ref in refs:
        verify(Path(ref.path))


@pytest.mark.full
@pytest.mark.parametrize("place", ["trainers", pytest.param("lagging", marks=pytest.mark.full)])
def test_the_next_attempt_trains_and_the_one_before_leaves(
    request: pytest.FixtureRequest, place: str
) -> None:
    trainers: Trainers = request.getfixturevalue(place)
    first = trainers.train()
    began = time.monotonic()
    second = trainers.start(trainers.config(attempt=2))
    assert "attempt 2 now writes to" in leave_overtaken(first, began)
    go_on(trainers, second)


@pytest.mark.full
def test_an_attempt_that_was_stopped_meanwhile_leaves_when_it_comes_back(lagging: Trainers) -> None:
    first = lagging.train()
    pid = first.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    second = lagging.train(attempt=2)
    began = time.monotonic()
    os.kill(pid, signal.SIGCONT)
    leave_overtaken(first, began)
    # If the stop came between the check and the rename, the next report replaces the file again.
    until(lambda: Progress.read(lagging.place / "run" / "progress.json").attempt == 2)
    go_on(lagging, second)


@pytest.mark.full
def test_both_ranks_of_an_overtaken_attempt_end(lagging: Trainers, tmp_path: Path) -> None:
    """Nobody saves: it is the watch that tells rank 0, and rank 0 that tells the other."""
    seldom: dict[str, Any] = {"checkpoint": {"every_steps": 10**6}, "world": {"nproc_per_node": 2}}
    first = lagging.start(lagging.config(**seldom))
    until(lambda: any(event["event"] == "step" for event in events(first.config)))
    began = time.monotonic()
    # safetensors renames what it has written, so that no model comes into such a layer.
    second = lagging.start(
        lagging.config(attempt=2, training={"max_steps": 2}, output={"dir": str(tmp_path / "out")})
    )
    assert "attempt 2 now writes to" in leave_overtaken(first, began)
    assert second.codes() == [0]


def test_of_two_starts_of_one_attempt_one_trains(lagging: Trainers) -> None:
    both = [lagging.start(lagging.config()) for _ in range(2)]
    began = time.monotonic()
    until(lambda: any(not ranks.processes[0].is_alive() for ranks in both))
    gone, other = sorted(both, key=lambda ranks: ranks.processes[0].is_alive())
    leave_overtaken(gone, began)
    until(lambda: bool(ledger(lagging.root)))
    other.processes[0].terminate()
    assert other.codes() == [ExitCode.PREEMPTED]


@pytest.mark.parametrize(
    "shared",
    ["checkpoint", *(pytest.param(one, marks=pytest.mark.full) for one in ("output", "run_dir"))],
)
def test_another_job_is_refused_and_the_first_trains_on(lagging: Trainers, shared: str) -> None:
    first = lagging.train()
    own: dict[str, Any] = {
        "checkpoint": {"dir": str(lagging.place / "other-checkpoints")},
        "output": {"dir": str(lagging.place / "other-output")},
        "run_dir": str(lagging.place / "other-run"),
    }
    del own[shared]
    second = lagging.start(lagging.config("uid-b", **own))
    assert second.codes() == [ExitCode.CONFIG]
    said = second.termination().message
    assert "belongs to the job default/a (uid uid-a)" in said
    assert not list(lagging.place.glob("other-*/*"))
    newest = ledger(lagging.root)[0].step
    until(lambda: ledger(lagging.root)[0].step > newest)
    first.processes[0].terminate()
    assert first.codes() == [ExitCode.PREEMPTED]
    assert {event["attempt"] for event in events(first.config)} == {1}


@pytest.mark.full
def test_a_job_made_anew_goes_on_from_the_orphans_checkpoints(lagging: Trainers) -> None:
    orphan = lagging.train()
    anew = JobRef(name="a", uid="uid-0")
    began = time.monotonic()
    second = lagging.start(lagging.config(job=anew.model_dump(), take_over=True))
    assert "(uid uid-0) has taken over" in leave_overtaken(orphan, began)
    until(lambda: bool(ledger(lagging.root)) and verify(newest_of(lagging)).job.uid == "uid-0")
    second.processes[0].terminate()
    assert second.codes() == [ExitCode.PREEMPTED]


def newest_of(trainers: Trainers) -> Path:
    return Path(ledger(trainers.root)[0].path)


def test_a_trainer_whose_folder_is_moved_away_leaves(trainers: Trainers) -> None:
    first = trainers.train()
    aside = trainers.place / "aside"
    trainers.root.rename(aside)
    assert first.codes() == [ExitCode.ERROR], "a restart claims anew, and is refused if it must be"
    assert "is gone" in first.termination().message
    assert not list(trainers.root.glob("step-*/manifest.json"))
    for ref in ledger(aside):
        verify(Path(ref.path))
    assert Progress.read(trainers.place / "run" / "progress.json").step >= ledger(aside)[0].step

"""Ranks wait for what one does alone, longer than any collective would, and see when it is gone."""

import os
import signal
from pathlib import Path

from finetune_trainer.config import ExitCode, FailureClass
from launches import Launch, launch, train_config, until

TIMEOUT_SECONDS = 5


def start(folder: Path) -> Launch:
    config = train_config(folder, control={"collective_timeout_seconds": TIMEOUT_SECONDS})
    return launch(config, "work_alone")


def test_a_rank_that_is_busy_for_three_times_the_timeout_is_waited_for(tmp_path: Path) -> None:
    started = start(tmp_path)
    assert started.wait() == ExitCode.DONE, started.stderr
    assert started.termination.message == "rank 0 of 2, sum 2"


def test_when_rank_0_is_killed_meanwhile_it_is_named_by_all(tmp_path: Path) -> None:
    started = start(tmp_path)
    os.kill(started.pids_of_ranks()[0], signal.SIGKILL)
    assert started.wait() == ExitCode.KILLED
    words = started.termination
    assert (words.failure_class, words.rank) == (FailureClass.WORKER_LOST, 0)
    [failed] = [event for event in started.events(1) if event["event"] == "failed"]
    assert failed["reason"] == FailureClass.WORKER_LOST
    assert "rank 0" in failed["message"]


def test_a_stop_ends_the_work_and_the_waiting(tmp_path: Path) -> None:
    started = start(tmp_path)
    started.pids_of_ranks()
    until(lambda: started.events(1)[-1]["event"] == "phase")
    started.process.send_signal(signal.SIGTERM)
    assert started.wait() == ExitCode.PREEMPTED
    assert started.termination.failure_class is FailureClass.PREEMPTED

"""Ranks wait for what one does alone, longer than any collective would, and see when it is gone."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.config import ExitCode, FailureClass
from finetune_trainer.control import classify
from support.checkpoint.checkpoint_fixtures import run_processes
from support.launch.launches import Launch, launch, train_config, until
from support.strategies.parity import Case, prepared, train_steps, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMEOUT_SECONDS = 5


def start(folder: Path) -> Launch:
    config = train_config(folder, control={"collective_timeout_seconds": TIMEOUT_SECONDS})
    return launch(config, "work_alone")


@pytest.mark.full
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


def _leave_out_the_last_rank(group: "ProcessGroup", folder: Path, case: Case) -> None:
    world, has_ended = world_of(group), folder / "ended"
    control = {"collective_timeout_seconds": TIMEOUT_SECONDS}
    strategy = prepared(case, folder, world, control=control)
    if world.rank == world.world_size - 2:  # which divides something with the last one alone
        with pytest.raises(RuntimeError) as raised:
            train_steps(strategy, case, world, range(1))
        has_ended.write_text(classify(raised.value).failure_class)
    until(has_ended.exists)  # a process that ends would be noticed at once
    os._exit(0)


@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        pytest.param(Case("hybrid", {"type": "fsdp", "replicas": 2}), 4, id="a mesh"),
        pytest.param(Case("zero2", {"type": "zero2"}), 2, id="DeepSpeed", marks=pytest.mark.full),
    ],
)
def test_groups_that_libraries_make_have_the_timeout_that_is_asked_for(
    case: Case, num_ranks: int, tmp_path: Path
) -> None:
    codes = run_processes(
        _leave_out_the_last_rank,
        tmp_path,
        case,
        world_size=num_ranks,
        deepspeed=num_ranks == 2,
        timeout_seconds=90,
    )
    assert codes == [0] * num_ranks
    assert (tmp_path / "ended").read_text() == FailureClass.HUNG

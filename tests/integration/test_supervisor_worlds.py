"""Ranks find each other: under our supervisor on one or two nodes, and under other launchers."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import TrainConfig
from launches import ENTRIES, Launch, clean_environment, free_port, launch, train_config

Start = Callable[..., Launch]


@pytest.fixture
def started() -> Iterator[Start]:
    """Start main processes, and end those that a failed test left behind."""
    launches: list[Launch] = []

    def start(config: TrainConfig, entry: str, environ: dict[str, str] | None = None) -> Launch:
        launches.append(launch(config, entry, environ))
        return launches[-1]

    yield start
    for one in launches:
        if one.process.poll() is None:
            one.process.kill()
            one.wait()


@pytest.fixture
def nodes(started: Start, tmp_path: Path) -> Callable[[str], list[Launch]]:
    """Start the main processes of two nodes of one rank each, the second node first."""
    endpoint = f"localhost:{free_port()}"

    def start(rank: int, entry: str) -> Launch:
        folder = tmp_path / f"node-{rank}"
        folder.mkdir()
        config = train_config(folder, world={"nnodes": 2, "nproc_per_node": 1})
        environ = {"FINETUNE_NODE_RANK": str(rank), "FINETUNE_RDZV_ENDPOINT": endpoint}
        return started(config, entry, environ)

    return lambda entry: [start(rank, entry) for rank in (1, 0)][::-1]


def test_runs_in_a_row_exit_with_0(started: Start, tmp_path: Path) -> None:
    for number in range(3):  # gloo's teardown used to abort one run in two
        folder = tmp_path / str(number)
        folder.mkdir()
        run = started(train_config(folder), "finish")
        assert run.wait() == 0, run.stderr


def test_two_nodes_make_one_world_and_both_exit_with_0(
    nodes: Callable[[str], list[Launch]],
) -> None:
    runs = nodes("finish")
    assert [run.wait() for run in runs] == [0, 0], [run.stderr for run in runs]
    assert [run.termination.message for run in runs] == [
        "rank 0 of 2, sum 2",
        "rank 1 of 2, sum 2",
    ]


def test_a_stop_of_one_node_is_agreed_by_the_other(nodes: Callable[[str], list[Launch]]) -> None:
    first, second = nodes("train")
    first.wait_for_step(rank=0)
    second.wait_for_step(rank=1)
    second.process.terminate()
    assert [first.wait(), second.wait()] == [75, 75], [first.stderr, second.stderr]
    assert first.termination.step == second.events(1)[-1]["termination"]["step"] > 0


def test_a_lost_node_ends_the_other_without_blame(nodes: Callable[[str], list[Launch]]) -> None:
    first, second = nodes("train")
    first.wait_for_step(rank=0)
    second.wait_for_step(rank=1)
    second.process.kill()
    assert first.wait() == 1, first.stderr
    assert (first.termination.failure_class, first.termination.rank) == ("WorkerLost", None)
    assert second.wait() == -9


FOREIGN = {
    "Azure ML": {"RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "{rank}"},
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
}


def foreign(launcher: str, rank: int, port: int) -> dict[str, str]:
    """Return what a launcher sets for one of two processes; mpirun names no address."""
    values = {name: value.format(rank=rank) for name, value in FOREIGN[launcher].items()}
    if launcher == "mpirun":
        return values
    return {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("launcher", FOREIGN)
def test_under_a_foreign_launcher_each_process_is_a_rank_and_rank_0_has_the_last_word(
    started: Start, tmp_path: Path, launcher: str
) -> None:
    config, port = train_config(tmp_path), free_port()
    ranks = [started(config, "finish", foreign(launcher, rank, port)) for rank in (0, 1)]
    assert [run.wait() for run in ranks] == [0, 0], [run.stderr for run in ranks]
    assert ranks[0].termination.message == "rank 0 of 2, sum 2"


def test_under_a_foreign_launcher_a_stop_is_agreed_as_well(started: Start, tmp_path: Path) -> None:
    config, port = train_config(tmp_path), free_port()
    ranks = [started(config, "train", foreign("Azure ML", rank, port)) for rank in (0, 1)]
    ranks[0].pids_of_ranks()
    ranks[1].process.terminate()
    assert [run.wait() for run in ranks] == [75, 75], [run.stderr for run in ranks]
    assert ranks[0].termination.failure_class == "Preempted"


def test_a_launcher_that_starts_too_few_processes_is_told_so(
    started: Start, tmp_path: Path
) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    run = started(train_config(tmp_path), "finish", environ)
    assert run.wait() == 93
    assert "the environment started 1 rank(s), but the configuration asks for 2" in run.stderr
    assert run.termination.failure_class == "DoNotRestart"


def test_torchrun_itself_may_start_the_ranks(tmp_path: Path) -> None:
    config: Any = train_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *command, str(ENTRIES), str(path), "finish"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Completed: rank 0 of 2, sum 2" in done.stderr

"""Ranks find each other under our supervisor, on one or two nodes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.launch.launches import Launch, free_port, train_config

Start = Callable[..., Launch]


@pytest.fixture
def nodes(start: Start, tmp_path: Path) -> Callable[[str], list[Launch]]:
    """Start the main processes of two nodes of one rank each, the second node first."""
    endpoint = f"localhost:{free_port()}"

    def start_node(rank: int, entry: str) -> Launch:
        folder = tmp_path / f"node-{rank}"
        folder.mkdir()
        config = train_config(folder, world={"nnodes": 2, "nproc_per_node": 1})
        environ = {"FINETUNE_NODE_RANK": str(rank), "FINETUNE_RDZV_ENDPOINT": endpoint}
        return start(config, entry, environ)

    return lambda entry: [start_node(rank, entry) for rank in (1, 0)][::-1]


@pytest.mark.full
def test_runs_in_a_row_exit_with_0(start: Start, tmp_path: Path) -> None:
    for number in range(3):  # gloo's teardown used to abort one run in two
        folder = tmp_path / str(number)
        folder.mkdir()
        run = start(train_config(folder), "finish")
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


@pytest.mark.full
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

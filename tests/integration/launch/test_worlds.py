"""Ranks find each other under our supervisor, on one or two nodes."""

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_trainer.config import FailureClass, Progress
from support.launch.launches import Launch, free_port, train_config, until

Start = Callable[..., Launch]
KEY = secrets.token_hex(32)


@pytest.fixture
def nodes(start: Start, tmp_path: Path) -> Callable[[str], list[Launch]]:
    """Start the main processes of two nodes of one rank each, the second node first.

    They have a key, so their ranks use the store through the door of node 0.
    """
    endpoint = f"localhost:{free_port()}"

    def start_node(rank: int, entry: str) -> Launch:
        folder = tmp_path / f"node-{rank}"
        folder.mkdir()
        config = train_config(folder, world={"nnodes": 2, "nproc_per_node": 1})
        environ = {"FINETUNE_NODE_RANK": str(rank), "FINETUNE_RDZV_ENDPOINT": endpoint}
        return start(config, entry, {**environ, "FINETUNE_RDZV_KEY": KEY})

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


def test_the_key_of_an_attempt_is_in_no_log_and_no_file(
    nodes: Callable[[str], list[Launch]], tmp_path: Path
) -> None:
    first, second = nodes("train")
    second.wait_for_step(rank=1)
    for rank, run in enumerate((first, second)):
        pid = run.wait_for_step(rank)
        assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        run.process.terminate()
    assert [first.wait(), second.wait()] == [75, 75]
    assert KEY not in first.stderr + second.stderr
    files = [one for one in tmp_path.rglob("*") if one.is_file()]
    assert not [one for one in files if KEY.encode() in one.read_bytes()]


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


def test_rank_0_of_a_pod_shows_signs_of_life_while_it_waits_and_reports_the_missing_rank(
    start: Start, tmp_path: Path
) -> None:
    config = train_config(tmp_path, world={"nnodes": 2, "nproc_per_node": 1})
    pod = {
        "JOB_COMPLETION_INDEX": "0",
        "FINETUNE_NODE_NAME": "node-a",
        "FINETUNE_RDZV_ENDPOINT": f"localhost:{free_port()}",
    }
    run, path = start(config, "finish", pod), Path(config.run_dir) / "progress.json"
    until(lambda: path.exists() and Progress.read(path).waits_for is not None)
    first = Progress.read(path)
    assert first.waits_for == "1 of 2 ranks have not arrived (1)"
    # Without them the watchdog or the liveness probe would end the rank as hanging.
    until(lambda: Progress.read(path).time > first.time)
    run.process.terminate()
    assert run.wait() == 75, run.stderr
    assert run.termination.failure_class is FailureClass.PREEMPTED

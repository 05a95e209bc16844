"""The main process starts its ranks again after a fault: when, how often, and from where."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launch.journals import journals_in
from support.launch.launches import Launch, is_alive, train_config, until

Start = Callable[..., Launch]


@pytest.fixture
def started(start: Start, tmp_path: Path) -> Start:
    """Start a main process that may restart its ranks."""

    def started(entry: str, restarts: int, **environ: str) -> Launch:
        config = train_config(tmp_path, world={"restarts_in_place": restarts})
        return start(config, entry, environ)

    return started


def starts(run: Launch) -> int:
    """Return how often rank 0 began."""
    return sum(event["event"] == "started" for event in run.events(0))


@pytest.mark.full
def test_a_killed_rank_is_restarted_with_its_peers_and_continues_the_attempt(
    started: Start,
) -> None:
    run = started("act_at_first", 2, ACT="sigkill", ACT_RANK="1", ACT_STARTS="2")
    assert run.wait() == 0, run.stderr
    last_words = run.termination
    assert last_words.progress is not None
    assert last_words.progress.restarts_in_place == 2
    assert last_words.message == "start 2, continued True"
    for rank in (0, 1):
        folders = [path.parent.name for path in journals_in(Path(run.config.run_dir), rank)]
        assert folders == ["attempt-1.1", "attempt-1.2", "attempt-1.3"]
    assert "WorkerLost: rank 1 was killed from outside (SIGKILL); restarting all" in run.stderr


@pytest.mark.full
def test_a_fault_that_comes_again_ends_the_attempt_with_its_own_code(started: Start) -> None:
    run = started("act", 1, ACT="bug", ACT_RANK="1")
    assert run.wait() == 1, run.stderr
    assert (run.termination.failure_class, run.termination.rank) == ("Error", 1)
    assert starts(run) == 2


@pytest.mark.full
@pytest.mark.parametrize(("act", "code"), [("data", 65), ("memory", 137)])
def test_what_would_only_fail_again_is_not_restarted(started: Start, act: str, code: int) -> None:
    run = started("act", 3, ACT=act, ACT_RANK="1")
    assert run.wait() == code, run.stderr
    assert starts(run) == 1


@pytest.mark.full
def test_ranks_that_fail_while_they_are_told_to_stop_are_not_restarted(started: Start) -> None:
    run = started("train_on", 3)
    ranks = run.pids_of_ranks()
    os.kill(ranks[0], signal.SIGSTOP)
    run.process.terminate()
    os.kill(ranks[1], signal.SIGKILL)
    assert run.wait() == 137, run.stderr
    assert starts(run) == 1
    until(lambda: not any(map(is_alive, ranks)))


def test_several_nodes_cannot_restart_in_place(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"spec\.restartPolicy\.restartsInPlace 1 is not possible with 2 nodes"
    ):
        train_config(tmp_path, world={"nnodes": 2, "restarts_in_place": 1})

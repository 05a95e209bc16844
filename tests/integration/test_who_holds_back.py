"""A rank that holds the others back is named by the page of rank 0's node, with what it does."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faulty_ranks import FAULTS, FaultyRanks
from finetune_trainer.config import SuspectCause
from launches import until
from node_pages import scrape

STANDING = {"asleep": "in stay_asleep", "holds the lock": "in hold_the_lock"}
PROCESS = {"asleep": "asleep", "holds the lock": "asleep", "stopped": "stopped"}

Start = Callable[..., FaultyRanks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ranks of which one is faulty."""
    started: list[FaultyRanks] = []

    def start(num_ranks: int, fault: str, rank: int = 1, **environ: str) -> FaultyRanks:
        folder = tmp_path / str(len(started))
        started.append(FaultyRanks(folder, num_ranks, fault, rank, **environ))
        return started[-1]

    yield start
    for one in started:
        one.close()


def check_evidence(ranks: FaultyRanks, folder: str) -> None:
    """Expect the stacks and the collectives of all ranks that can tell of them."""
    kept = Path(ranks.config.run_dir) / folder

    def text_of(rank: int) -> str:
        path = kept / f"rank-{rank}.stacks.txt"
        return path.read_text() if path.exists() else ""

    until(lambda: all(text_of(rank) for rank in range(ranks.num_ranks)), timeout=30)
    of_culprit = text_of(ranks.rank)
    assert f"is {PROCESS[ranks.fault]}, in state" in of_culprit
    assert STANDING.get(ranks.fault, "it has written no stacks") in of_culprit
    others = set(range(ranks.num_ranks)) - {ranks.rank}
    assert all("in work" in text_of(rank) for rank in others)
    answering = others if ranks.fault == "stopped" else range(ranks.num_ranks)
    for rank in answering:
        path = kept / f"rank-{rank}.collectives.json.gz"
        until(path.exists, timeout=30)
        assert json.loads(gzip.decompress(path.read_bytes()))["entries"]


def check_stuck(ranks: FaultyRanks, seconds: float) -> None:
    """Expect that whoever stays away is named, and nobody else."""
    found = ranks.wait_for_suspect(seconds)
    assert (found.rank, found.node, found.cause) == (ranks.rank, "node-a", SuspectCause.STUCK)
    assert (found.score, found.process) == (None, PROCESS[ranks.fault])
    assert len(ranks.progress().suspects) == 1
    assert found.evidence is not None
    check_evidence(ranks, found.evidence)
    assert all(process.is_alive() for process in ranks.processes)


def test_who_stays_away_from_a_collective_is_named_and_its_stacks_are_kept(start: Start) -> None:
    soon = {"FINETUNE_WATCH_SPEED": "10", "FAULT_STEP": "5"}
    for one in [start(4, fault, 2, **soon) for fault in FAULTS]:
        check_stuck(one, 30)


@pytest.mark.full
def test_all_faults_of_four_ranks_and_of_two_are_named_in_time_and_clean_ranks_never(
    start: Start,
) -> None:
    """All at once, as nobody computes: the slow ones in 30 s, those that stay away in 60 s."""
    clean = start(4, "none")
    slow = [start(num_ranks, "slower") for num_ranks in (4, 2)]
    stuck = [start(num_ranks, fault, 0) for num_ranks in (4, 2) for fault in FAULTS]
    for one in (clean, *slow, *stuck):
        one.wait_for_step(10)
    for one in slow:
        found = one.wait_for_suspect(30)
        assert (found.rank, found.cause) == (1, SuspectCause.COMPUTE)
        assert found.score == pytest.approx(1.2, rel=0.05)
    for one in stuck:
        check_stuck(one, 60)
    assert clean.progress().suspects == ()
    scores = scrape(clean.url)
    assert all(("finetune_train_straggler_score", str(rank)) in scores for rank in range(4))

"""A rank that holds the others back is named by the page of rank 0's node, with what it does."""

import gzip
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from finetune_trainer.config import Progress, Suspect, SuspectCause, read_progress
from finetune_trainer.telemetry.node.recorder_client import num_begun
from support.launch.faulty_ranks import FAULTS, FaultyRanks
from support.launch.launches import Launch, free_port, launch, train_config, until
from support.telemetry.node_pages import ask, free_ports, scrape

STANDING = {"asleep": "in stay_asleep", "holds the lock": "in hold_the_lock"}
PROCESS = {"asleep": "asleep", "holds the lock": "asleep", "stopped": "stopped"}

Start = Callable[..., FaultyRanks]
SOON = {"FINETUNE_WATCH_SPEED": "10", "FAULT_STEP": "5"}


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
    assert STANDING.get(ranks.fault, "the rank has written no stacks") in of_culprit
    others = set(range(ranks.num_ranks)) - {ranks.rank}
    assert all("in work" in text_of(rank) for rank in others)
    answering = others if ranks.fault == "stopped" else {*others, ranks.rank}
    begun = {}
    for rank in answering:
        path = kept / f"rank-{rank}.collectives.json.gz"
        until(path.exists, timeout=30)
        dump = gzip.decompress(path.read_bytes())
        assert json.loads(dump)["entries"]
        begun[rank] = num_begun(dump)
    assert len({begun[rank] for rank in others}) == 1
    if ranks.rank in begun:  # the recorder names the same
        assert min(begun, key=lambda rank: begun[rank] or 0) == ranks.rank


def check_stuck(ranks: FaultyRanks, seconds: float) -> None:
    """Expect that whoever stays away is named, and nobody else."""
    found = ranks.wait_for_suspect(seconds)
    assert (found.rank, found.node, found.cause) == (ranks.rank, "node-a", SuspectCause.STUCK)
    assert (found.score, found.process) == (None, PROCESS[ranks.fault])
    assert len(ranks.progress().suspects) == 1
    assert found.evidence is not None
    until(lambda: bool(read_progress(Path(ranks.config.run_dir)).suspects))
    check_evidence(ranks, found.evidence)
    assert all(process.is_alive() for process in ranks.processes)


@pytest.mark.full
def test_who_stays_away_from_a_collective_is_named_and_its_stacks_are_kept(start: Start) -> None:
    for one in [start(4, fault, 2, **SOON) for fault in FAULTS]:
        check_stuck(one, 30)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Start a rank on each of two nodes, both on this machine; return where their pages are."""
    nodes: list[Launch] = []

    def run(fault: str, **environ: str) -> list[str]:
        ports, store = free_ports(2), free_port()
        urls = [f"http://127.0.0.1:{ports + node}/metrics" for node in (0, 1)]
        for node, url in enumerate(urls):
            config = train_config(
                tmp_path,
                world={"nnodes": 2, "nproc_per_node": 1},
                telemetry={"metrics_port": ports},
            )
            place = {
                "FINETUNE_NODE_RANK": str(node),
                "FINETUNE_NODE_NAME": f"node-{node}",
                "FINETUNE_RDZV_ENDPOINT": f"127.0.0.1:{store}",
                "FINETUNE_RDZV_KEY": 64 * "0",
            }
            faulty = {**SOON, "FAULT": fault, "FAULT_RANK": "1", **environ}
            nodes.append(launch(config, "support.launch.faulty_ranks:work", place | faulty))
            until(partial(answers, url))  # before the other node takes the port
        return urls

    yield run
    for one in nodes:
        one.process.kill()
        one.wait()


def answers(url: str) -> bool:
    try:
        return ask(url, "GET", "/metrics").status == 200
    except ConnectionRefusedError:
        return False


def suspects_of(url: str) -> tuple[Suspect, ...]:
    answer = ask(url, "GET", "/progress")
    return Progress.model_validate_json(answer.text).suspects if answer.status == 200 else ()


@pytest.mark.full
def test_a_rank_of_another_node_is_named_by_the_page_of_rank_0s_node(
    two_nodes: Callable[..., list[str]], tmp_path: Path
) -> None:
    first, second = two_nodes("holds the lock")
    until(lambda: bool(suspects_of(first)))
    (found,) = suspects_of(first)
    assert (found.rank, found.node, found.process) == (1, "node-1", "asleep")
    assert found.evidence is not None
    kept = tmp_path / "run" / found.evidence
    until(lambda: (kept / "rank-1.collectives.json.gz").exists(), timeout=30)
    assert "in hold_the_lock" in (kept / "rank-1.stacks.txt").read_text()
    until(lambda: (kept / "rank-0.stacks.txt").exists(), timeout=30)
    assert ask(second, "GET", "/progress").status == 404
    assert ask(first, "POST", "/ranks", b'{"version": 1, "word": "?"}').status in (400, 403)


@pytest.mark.full
def test_each_page_has_the_scores_of_its_own_ranks(
    two_nodes: Callable[..., list[str]],
) -> None:
    urls = two_nodes("slower", FINETUNE_WATCH_SPEED="2")

    def scores(url: str) -> dict[str, float]:
        name = "finetune_train_straggler_score"
        return {key[1]: value for key, value in scrape(url).items() if key[0] == name}

    until(lambda: all(scores(url) for url in urls))
    assert [set(scores(url)) for url in urls] == [{"0"}, {"1"}]
    until(lambda: [(one.rank, one.node) for one in suspects_of(urls[0])] == [(1, "node-1")])


@pytest.mark.full
def test_all_faults_are_named_before_their_deadlines_and_clean_ranks_never(
    start: Start,
) -> None:
    """All at once, as nobody computes: the slow ones in 30 s, those that stay away in 60 s."""
    clean = start(4, "none")
    slow = [start(num_ranks, "slower") for num_ranks in (4, 2)]
    stuck = [start(2, fault, 0) for fault in FAULTS]  # the test above has four ranks
    for one in (clean, *slow, *stuck):
        one.wait_for_step(10)
    for one in slow:
        found = one.wait_for_suspect(30)
        assert (found.rank, found.cause) == (1, SuspectCause.COMPUTE)
        assert found.score is not None
        assert found.score >= 1.1
    for one in stuck:
        check_stuck(one, 60)
    assert clean.progress().suspects == ()
    scores = scrape(clean.url)
    assert all(("finetune_train_straggler_score", str(rank)) in scores for rank in range(4))

"""The trainer as an Azure ML job starts it: real processes, with exactly Azure ML's variables."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.checkpoint.commit import ledger, verify
from finetune_trainer.claims.names import Listing
from finetune_trainer.config import TrainConfig
from finetune_trainer.export.publish import job_of_export
from support.azureml.azureml_nodes import Node, start_node, variables
from support.checkpoint.lagging_layer import LaggingLayer, lagging_layer
from support.launch.forked_ranks import attempt, events, numbers
from support.launch.launches import free_port, train_config, until
from support.launch.tiny_run import write_inputs

STEPS, SAVE_EVERY, LAG_SECONDS = 40, 4, 0.05

Start = Callable[..., Node]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaggingLayer]:
    folder = tmp_path_factory.mktemp("layer")
    with lagging_layer(folder, lag_seconds=LAG_SECONDS, blobfuse=True) as mounted:
        yield mounted


@pytest.fixture
def start() -> Iterator[Start]:
    """Start nodes as `start_node` does, and end those that a failed test left."""
    started: list[Node] = []

    def start(*arguments: Any, **options: Any) -> Node:
        started.append(start_node(*arguments, **options))
        return started[-1]

    yield start
    for node in started:
        if node.process.poll() is None:
            node.process.kill()
            node.wait()


def run_config(folder: Path, nodes: int, **changes: Any) -> TrainConfig:
    """Return a run of two ranks, with `mount://` for what only a node knows."""
    values: dict[str, Any] = {
        "world": {"nnodes": nodes, "nproc_per_node": 2 // nodes},
        "model": {"path": "mount://model"},
        "data": {
            "train": {"path": "mount://rows"},
            "max_seq_len": 64,
            "cache_dir": "mount://scratch/cache",
        },
        "method": {"type": "lora", "lora": {"r": 4, "dropout": 0.2}},
        "output": {"format": "adapter", "dir": "mount://output"},
        "training": {"max_steps": STEPS},
        "checkpoint": {
            "dir": "mount://checkpoints/of/the-job",
            "every_steps": SAVE_EVERY,
            "resume_from": "none",
        },
        "run_dir": "mount://local/run",
        "termination_path": "mount://scratch/termination.json",
        "listing_lag_seconds": LAG_SECONDS,
    }
    return train_config(folder, **values | changes)


@pytest.fixture(scope="module")
def plain(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    """The numbers of a plain run of two ranks on this machine."""
    folder = tmp_path_factory.mktemp("plain")
    config = run_config(
        folder,
        nodes=1,
        model={"path": str(inputs / "model")},
        data={"train": {"path": str(inputs / "train.jsonl")}, "max_seq_len": 64},
        output={"format": "adapter"},
        checkpoint={"every_steps": SAVE_EVERY},
        run_dir=str(folder / "run"),
        termination_path=str(folder / "termination.json"),
    )
    assert attempt(config) == [0, 0]
    return numbers(config)


def mounts(inputs: Path, place: Path, local: Path) -> dict[str, str]:
    """Return the mounts of a node; `local` is its own, where a test can still look at the end."""
    return {
        "model": str(inputs / "model"),
        "rows": str(inputs / "train.jsonl"),
        "checkpoints": str(place / "checkpoints"),
        "output": str(place / "output"),
        "local": str(local),
    }


@pytest.mark.full
def test_one_node_without_a_distribution_trains_as_a_plain_run(
    start: Start, inputs: Path, plain: dict[str, dict[int, Any]], tmp_path: Path
) -> None:
    config = run_config(tmp_path, nodes=1)
    node = start(config, mounts(inputs, tmp_path / "place", tmp_path / "local"), {})
    assert node.wait() == 0, node.stderr
    assert node.last_words.failure_class == "Completed"
    assert node.last_words.step == STEPS
    assert numbers(node.config) == plain


class TwoNodes:
    """A run of two nodes whose folders are on a layer like BlobFuse; each start has new disks.

    Nobody tells a later start that it is one: `resumeFrom` is none, the attempt the same.
    """

    def __init__(self, start: Start, inputs: Path, place: Path, disks: Path) -> None:
        self._start, self._inputs, self._place, self._disks = start, inputs, place, disks
        self._given = run_config(disks, nodes=2)
        self.root = place / "checkpoints" / "of" / "the-job"

    def start(self, name: str, **environ: str) -> list[Node]:
        port = free_port()
        disks = [self._disks / f"{name}-{node}" for node in (0, 1)]
        return [
            self._start(
                self._given,
                mounts(self._inputs, self._place, disk),
                variables(node, 2, port) | environ,
            )
            for node, disk in enumerate(disks)
        ]

    def finish(self, before: list[Node]) -> dict[int, Any]:
        """Start it again, and return the numbers of the steps of both."""
        newest = ledger(self.root)[0]
        verify(Path(newest.path))
        nodes = self.start("again")
        assert [node.wait() for node in nodes] == [0, 0], [node.stderr for node in nodes]
        resumed = [one for one in events(nodes[0].config) if one["event"] == "resumed"]
        assert [one["step"] for one in resumed] == [newest.step]
        assert {claim.generation for claim in Listing.of(self.root).started} == {1, 2}
        assert job_of_export(Path(nodes[0].config.output.dir)) == self._given.job
        assert nodes[0].last_words.artifacts
        return numbers(before[0].config)["steps"] | numbers(nodes[0].config)["steps"]


@pytest.fixture
def two_nodes(
    start: Start,
    inputs: Path,
    layer: LaggingLayer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> TwoNodes:
    return TwoNodes(start, inputs, layer.root / request.node.name, tmp_path)


@pytest.mark.full
def test_two_nodes_are_stopped_and_the_same_run_goes_on_from_its_own_commit(
    two_nodes: TwoNodes, plain: dict[str, dict[int, Any]], layer: LaggingLayer
) -> None:
    nodes = two_nodes.start("first")
    until(lambda: bool(ledger(two_nodes.root)) or nodes[0].process.poll() is not None)
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [75, 75], [node.stderr for node in nodes]
    said, saved = [node.last_words for node in nodes], ledger(two_nodes.root)[0]
    assert [one.failure_class for one in said] == ["Preempted"] * 2
    assert [one.message for one in said] == [
        f"stopped by another rank after step {saved.step}",
        f"stopped by SIGTERM after step {saved.step}",
    ]
    assert said[0].checkpoint == saved
    assert 0 < saved.step < STEPS
    assert two_nodes.finish(nodes) == plain["steps"]
    assert layer.refusals() == []


@pytest.mark.full
def test_a_run_that_was_killed_while_it_committed_goes_on_from_the_commit_before(
    two_nodes: TwoNodes, plain: dict[str, dict[int, Any]]
) -> None:
    nodes = two_nodes.start("first", FINETUNE_FAILPOINT=f"before-commit@{2 * SAVE_EVERY}:rank=0")
    assert [node.wait() for node in nodes] == [137, 1], [node.stderr for node in nodes]
    said = [node.last_words for node in nodes]
    assert [one.failure_class for one in said] == ["WorkerLost"] * 2
    assert said[0].message == "rank 0 was killed from outside (SIGKILL)"
    assert [ref.step for ref in ledger(two_nodes.root)] == [SAVE_EVERY]
    assert two_nodes.finish(nodes) == plain["steps"]


def test_the_node_that_is_to_blame_says_so_and_the_other_that_it_is_not(
    start: Start, tmp_path: Path
) -> None:
    config, port = train_config(tmp_path, world={"nnodes": 2, "nproc_per_node": 1}), free_port()
    act = {"ACT": "data", "ACT_RANK": "1"}
    nodes = [start(config, {}, variables(n, 2, port) | act, stand_in="act") for n in (0, 1)]
    assert [node.wait() for node in nodes] == [1, 65], [node.stderr for node in nodes]
    said = [node.last_words for node in nodes]
    assert [(one.failure_class, one.rank) for one in said] == [
        ("WorkerLost", None),
        ("DataError", 1),
    ]
    assert said[1].message == "data.train x.jsonl has no rows; add some"


def test_what_makes_no_node_is_refused_in_the_last_line(start: Start, tmp_path: Path) -> None:
    nodes = [
        start(run_config(tmp_path, nodes=1), {"model": "/x"}, {}),
        start(train_config(tmp_path), {}, variables(0, 8, 6105)),
    ]
    assert [node.wait() for node in nodes] == [78, 78]
    said = [node.last_words for node in nodes]
    assert {one.failure_class for one in said} == {"ConfigError"}
    assert said[0].message.startswith(
        "mount://rows: no argument of the command gives the path of rows"
    )
    assert said[1].message.startswith("WORLD_SIZE is 8, but spec.topology.nodes is 1: ")
    for node, one in zip(nodes, said, strict=True):
        assert f"ConfigError: {one.message}" in node.stderr

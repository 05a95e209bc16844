"""Layers compiled under DDP and FSDP on two ranks learn what a plain loop learns."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.model.compile import compile_layers
from finetune_trainer.strategies import parallelize
from support.checkpoint.checkpoint_fixtures import run_processes
from support.launch.launches import launch, train_config
from support.launch.tiny_run import write_inputs
from support.strategies import parity
from support.strategies.parity import Case, Outcome, reference, within_fp32

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CASES = [
    Case("ddp", {"type": "ddp"}, steps=6),
    # A layer of more than one of DDP's buckets, by which torch would divide its graph.
    Case("ddp-wide", {"type": "ddp"}, hidden_size=256, steps=6),
    Case("fsdp", {"type": "fsdp"}, steps=6),
    Case(
        "fsdp-lora-full",
        {"type": "fsdp", "activation_checkpointing": "full"},
        method="lora",
        steps=6,
    ),
]


def _train(group: "ProcessGroup | None", folder: Path, cases: Sequence[Case]) -> None:
    """Train with compiled layers; inductor would build a CPU's kernels for minutes."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    given: list[Any] = []

    def backend(graph: Any, *args: Any, **options: Any) -> Any:
        given.append(graph)
        return aot_eager(graph, *args, **options)

    made = parity.case_config

    def compiled(*given: Any, **changes: Any) -> Any:
        config = made(*given, **changes)
        training = config.training.model_copy(update={"compile": True, "is_compile_asked": True})
        return config.model_copy(update={"training": training})

    parity.case_config = compiled
    vars(parallelize)["compile_layers"] = partial(compile_layers, backend=backend)
    world = parity.world_of(group)
    for case in cases:
        torch._dynamo.reset()
        counters.clear()
        given.clear()
        outcome = parity.train_case(case, folder, world)
        found = vars(outcome) | {
            "graphs": counters["stats"]["unique_graphs"],
            "given": len(given),
            "breaks": dict(counters["graph_break"]),
        }
        torch.save(found, folder / f"{case.name}.{world.rank}.pt")


@pytest.mark.full
def test_compiled_layers_learn_under_ddp_and_fsdp_what_a_plain_loop_learns(tmp_path: Path) -> None:
    codes = run_processes(_train, tmp_path, CASES, world_size=2, timeout_seconds=280)
    assert codes == [0, 0]
    for case in CASES:
        ranks = [torch.load(tmp_path / f"{case.name}.{rank}.pt") for rank in range(2)]
        for found in ranks:
            assert found.pop("breaks") == {}
            assert found.pop("graphs") == 2, "the first layer's input may need no gradient"
            assert found.pop("given") == 2, "each is compiled in one piece"
        within_fp32(Outcome(**ranks[0]), reference(case))


@pytest.mark.full
def test_no_graph_is_compiled_before_the_first_step(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    train = {"path": str(inputs / "train.jsonl")}
    config = train_config(
        tmp_path,
        world={"nproc_per_node": 1},
        model={"path": str(inputs / "model")},
        data={"train": train, "format": "text", "columns": {"text": "prompt"}, "packing": True},
        method={"type": "lora", "lora": {"r": 2}},
        training={"global_batch_size": 2, "max_steps": 1, "compile": True},
        output={"format": "adapter"},
    )
    run = launch(config, "support.model.compiled_rank:run")
    assert run.wait() == 0, run.stderr
    graphs = json.loads((Path(config.run_dir) / "graphs.json").read_text())
    assert graphs["before"] == 0
    assert graphs["after"] > 0


@pytest.mark.full
def test_what_is_done_without_is_said_once_by_all_ranks_together(tmp_path: Path) -> None:
    """A PATH without g++ leaves layers as they are; each rank finds that, and rows that are cut."""
    inputs, nowhere = write_inputs(tmp_path / "inputs"), tmp_path / "nowhere"
    nowhere.mkdir()
    train = {"path": str(inputs / "train.jsonl")}
    config = train_config(
        tmp_path,
        model={"path": str(inputs / "model")},
        data={"train": train, "format": "text", "columns": {"text": "prompt"}, "max_seq_len": 8},
        method={"type": "lora", "lora": {"r": 2}},
        training={"global_batch_size": 2, "max_steps": 1, "compile": True},
        output={"format": "adapter"},
    )
    run = launch(config, "finetune_trainer.rank:run", {"PATH": str(nowhere)})
    assert run.wait() == 0, run.stderr
    for sentence in ("continues without compiled layers: it needs g++", "were cut to 8 tokens"):
        assert run.stderr.count(sentence) == 1, run.stderr
        for rank in range(2):
            noted = [line["message"] for line in run.events(rank) if line["event"] == "warning"]
            assert sum(sentence in message for message in noted) == 1

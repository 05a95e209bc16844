"""ZeRO jobs go on from a checkpoint: bit for bit on the same ranks, and on other ones, as others.

Each case trains four steps, saves, and goes on for four; whoever restores has to make the same
four steps. One launch serves many cases, since imports take longer than all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from finetune_trainer.checkpoint.shards import read_shards, write_shards
from support.checkpoint.checkpoint_fixtures import run_processes
from support.strategies.parity import Case, prepared, train_steps, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SAVED, STEPS = 4, 8
TOLERANCE = 2e-6

ZERO1 = Case("zero1", {"type": "zero1"}, micro_batch_size=1, steps=STEPS)
ZERO2 = Case("zero2", {"type": "zero2", "offload": "optimizer"}, micro_batch_size=1, steps=STEPS)
ZERO3 = Case("zero3", {"type": "zero3"}, micro_batch_size=1, steps=STEPS)
NARROW = [replace(c, name=f"{c.name}-bf16", precision="bf16") for c in (ZERO1, ZERO3)]
LORA = replace(ZERO3, name="lora-zero3", method="lora")
DDP = replace(ZERO2, name="ddp", strategy={"type": "ddp"})
FSDP = replace(ZERO2, name="fsdp", strategy={"type": "fsdp"})
CASES = (ZERO1, ZERO2, ZERO3, LORA, FSDP, *NARROW)

# What is saved, and who goes on with it.
ON_TWO = [(case, case) for case in CASES] + [
    (LORA, replace(LORA, strategy=DDP.strategy)),
    (LORA, replace(LORA, strategy=ZERO1.strategy)),
    (FSDP, replace(FSDP, strategy=ZERO2.strategy)),
    (ZERO3, replace(ZERO3, strategy=DDP.strategy)),
]
ON_OTHERS = [(case, case) for case in (ZERO1, ZERO2, ZERO3, LORA)]

# The first test waits for all launches, each of which has a limit of its own.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def shards_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what this rank holds of weights and moments."""
    from torch.distributed.tensor import DTensor

    parts = state["model"] | state["optimizer"]
    return {
        name: (part.to_local() if isinstance(part, DTensor) else part).clone()
        for name, part in parts.items()
    }


def save_and_go_on(group: "ProcessGroup | None", folder: Path) -> None:
    world = world_of(group)
    for case in CASES:
        strategy = prepared(case, folder, world)
        train_steps(strategy, case, world, range(SAVED))
        write_shards(strategy.state(), folder / case.name, group, SAVED)
        losses, norms = train_steps(strategy, case, world, range(SAVED, STEPS))
        found = {"losses": losses, "norms": norms, "shards": shards_of(strategy.state())}
        torch.save(found, folder / f"{case.name}.{world.rank}.pt")


def resume(group: "ProcessGroup | None", folder: Path, pairs: Sequence[tuple[Case, Case]]) -> None:
    world = world_of(group)
    for number, (saved, case) in enumerate(pairs):
        strategy = prepared(case, folder, world)
        state = strategy.state()
        read_shards(state, folder / saved.name, group)
        strategy.load_state(state)
        losses, norms = train_steps(strategy, case, world, range(SAVED, STEPS))
        found = {"losses": losses, "norms": norms, "shards": shards_of(strategy.state())}
        torch.save(found, folder / f"resumed-{world.world_size}-{number}.{world.rank}.pt")


def resume_alone(folder: Path, pairs: Sequence[tuple[Case, Case]]) -> None:
    resume(None, folder, pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("zero")
    launch(save_and_go_on, root, world_size=2)
    launch(resume, root, ON_TWO, world_size=2)
    return root


def launch(work: Any, *arguments: Any, world_size: int) -> None:
    codes = run_processes(work, *arguments, world_size=world_size, deepspeed=True)
    assert codes == [0] * world_size


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_resume_on_the_same_ranks_is_bitwise(folder: Path, number: int) -> None:
    for rank in range(2):
        expected = torch.load(folder / f"{CASES[number].name}.{rank}.pt")
        found = torch.load(folder / f"resumed-2-{number}.{rank}.pt")
        assert (found["losses"], found["norms"]) == (expected["losses"], expected["norms"])
        differing = [
            name
            for name, shard in expected["shards"].items()
            if not torch.equal(shard, found["shards"][name])
        ]
        assert differing == []


@pytest.mark.parametrize(
    "number",
    range(len(CASES), len(ON_TWO)),
    ids=[f"{a.name} as {b.strategy['type']}" for a, b in ON_TWO[len(CASES) :]],
)
def test_a_job_goes_on_under_another_strategy(folder: Path, number: int) -> None:
    expected = torch.load(folder / f"{ON_TWO[number][0].name}.0.pt")
    found = torch.load(folder / f"resumed-2-{number}.0.pt")
    assert found["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_job_goes_on_with_another_number_of_ranks(folder: Path, world_size: int) -> None:
    work = resume_alone if world_size == 1 else resume
    launch(work, folder, ON_OTHERS, world_size=world_size)
    for number, (saved, _) in enumerate(ON_OTHERS):
        expected = torch.load(folder / f"{saved.name}.0.pt")
        found = torch.load(folder / f"resumed-{world_size}-{number}.0.pt")
        assert found["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE, rel=0)

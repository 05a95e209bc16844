"""fp16: the loss scale, what overflows, and what of it a checkpoint brings back."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.checkpoint.shards import Snapshot, read_shards, write_shards
from finetune_trainer.config import TrainingConfig
from finetune_trainer.strategies.optimizer import (
    FIRST_LOSS_SCALE,
    GROWTH_INTERVAL,
    NativeOptimizer,
)
from support.checkpoint.checkpoint_fixtures import run_processes
from support.strategies.parity import Case, prepared, train_steps, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OVERFLOWS, SAVED, STEPS = 2, 4, 7
UNREDUCED = {"type": "fsdp", "reduce_each_micro_batch": False}
CASES = [
    Case(name, strategy, method=method, precision="fp16", poison=(OVERFLOWS, 1))
    for name, strategy, method in (
        ("ddp", {"type": "ddp"}, "full"),
        ("fsdp", {**UNREDUCED, "reshard_after_forward": True}, "full"),
        ("fsdp-lora", {**UNREDUCED, "reshard_after_forward": False}, "lora"),
        ("fsdp-reducing", {"type": "fsdp", "reduce_each_micro_batch": True}, "full"),
    )
]


def local(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of what this rank holds of every tensor."""
    copied = Snapshot().take(state)
    return {
        f"{section}.{name}": getattr(value, "to_local", lambda value=value: value)().clone()
        for section, values in copied.items()
        for name, value in values.items()
    }


def overflow_and_resume(group: "ProcessGroup", folder: Path) -> None:
    world = world_of(group)
    for case in CASES:
        strategy = prepared(case, folder, world)
        states = [local(strategy.state())]
        norms = []
        for step in range(STEPS):
            norms += train_steps(strategy, case, world, [step])[1]
            states.append(local(strategy.state()))
            if step + 1 == SAVED:
                write_shards(strategy.state(), folder / case.name, group, SAVED)
        again = prepared(case, folder, world)
        state = again.state()
        read_shards(state, folder / case.name, group)
        again.load_state(state)
        train_steps(again, case, world, range(SAVED, STEPS))
        result = {"norms": norms, "states": states, "resumed": local(again.state())}
        torch.save(result, folder / f"{case.name}.{world.rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp16")
    codes = run_processes(overflow_and_resume, folder, world_size=2, timeout_seconds=240)
    assert codes == [0, 0]
    return folder


def ranks(folder: Path, case: Case) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case.name}.{rank}.pt") for rank in range(2)]


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_an_overflow_on_one_rank_changes_nothing_but_the_scale_on_all(
    folder: Path, case: Case
) -> None:
    for rank in ranks(folder, case):
        before, after = rank["states"][OVERFLOWS : OVERFLOWS + 2]
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {"scaler.scale", "scaler.good_steps"}
        assert before["scaler.scale"] == FIRST_LOSS_SCALE
        assert before["scaler.good_steps"] == OVERFLOWS
        assert after["scaler.scale"] == FIRST_LOSS_SCALE / 2
        assert after["scaler.good_steps"] == 0
        finite = torch.tensor(rank["norms"]).isfinite().tolist()
        assert finite == [step != OVERFLOWS for step in range(STEPS)]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_what_is_trained_is_fp32_and_every_other_step_changes_it(folder: Path, case: Case) -> None:
    for rank in ranks(folder, case):
        states = rank["states"]
        trained = [name for name in states[0] if name.startswith("model.")]
        assert {states[0][name].dtype for name in trained} == {torch.float32}
        for step in set(range(STEPS)) - {OVERFLOWS}:
            before, after = states[step : step + 2]
            assert not all(torch.equal(before[name], after[name]) for name in trained)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_a_resume_brings_back_the_scale_and_goes_on_bit_for_bit(folder: Path, case: Case) -> None:
    for rank in ranks(folder, case):
        unbroken, resumed = rank["states"][-1], rank["resumed"]
        assert resumed["scaler.scale"] == FIRST_LOSS_SCALE / 2
        different = [name for name in unbroken if not torch.equal(unbroken[name], resumed[name])]
        assert different == []


def test_the_scale_doubles_after_many_steps_without_overflow() -> None:
    model = torch.nn.Linear(1, 1)
    training = TrainingConfig(
        global_batch_size=1, max_steps=1, learning_rate=1e-3, precision="fp16"
    )
    optimizer = NativeOptimizer(model, training, torch.device("cpu"))
    scaler = optimizer.state()["scaler"]
    scaler["good_steps"].fill_(GROWTH_INTERVAL - 1)
    optimizer.scaled(model(torch.ones(1)).sum()).backward()
    norm = optimizer.step(1e-3, max_norm=0)
    assert norm.item() == pytest.approx(2**0.5)
    assert (scaler["scale"], scaler["good_steps"]) == (FIRST_LOSS_SCALE * 2, 0)

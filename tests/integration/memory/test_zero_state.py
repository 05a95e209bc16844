"""The formula's state of a ZeRO engine against the storages that an engine of DeepSpeed retains."""

import gc
import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from finetune_trainer.config import TrainConfig
from finetune_trainer.memory.read_base import read_base
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.load import _base_dtype, without_weights
from finetune_trainer.model.loss import loss_inputs
from finetune_trainer.model.prepare import prepare_model
from finetune_trainer.sizing.method import with_method
from finetune_trainer.sizing.zero import engine_state
from finetune_trainer.strategies import create
from support.checkpoint.checkpoint_fixtures import run_processes
from support.launch.launches import train_config
from support.memory.family_setups import family_settings
from support.memory.memory_trace import row_batch
from support.strategies.parity import world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
CPU = torch.device("cpu")
STAGES, METHODS = ("zero1", "zero2", "zero3"), ("full", "lora")
CASES = [f"{stage} {method}" for stage, method in product(STAGES, METHODS)]


def settings() -> PretrainedConfig:
    found = family_settings("llama")
    found.num_hidden_layers, found.vocab_size = 1, 2048
    return found


def config_of(folder: Path, case: str, ranks: int) -> TrainConfig:
    stage, method = case.split()
    is_full = method == "full"
    return train_config(
        folder,
        world={"nproc_per_node": ranks},
        method={"type": method, **({} if is_full else {"lora": {"r": 64}})},
        output={"format": "merged" if is_full else "adapter"},
        strategy={"type": stage},
        training={"precision": "bf16", "global_batch_size": ranks},
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_retains_the_bytes_of_the_formula(ranks: int, tmp_path: Path) -> None:
    codes = run_processes(_measure, tmp_path, ranks, world_size=ranks, deepspeed=True)
    assert codes == [0] * ranks
    base = read_base(without_weights(settings(), torch.bfloat16).train())
    measured = json.loads((tmp_path / "bytes.json").read_text())
    for case in CASES:
        config = config_of(tmp_path, case, ranks)
        state = engine_state(with_method(base, config), config, itemsize=2)
        assert sum(state.values()) == pytest.approx(measured[case], rel=0.03), (case, state)


def _measure(*arguments: Any) -> None:
    group: ProcessGroup | None = arguments[0] if len(arguments) == 3 else None
    folder, ranks = arguments[-2:]
    world = world_of(group)
    found = {case: _engine_bytes(config_of(folder, case, ranks), world) for case in CASES}
    if world.is_main:
        (folder / "bytes.json").write_text(json.dumps(found))


def _engine_bytes(config: TrainConfig, world: Any) -> int:
    """Return the bytes of tensors that a step of an engine leaves."""
    before = _storages()
    model = AutoModelForCausalLM.from_config(settings(), dtype=_base_dtype(config)).train()
    module = prepare_model(choose_trained(model, config), config, CPU)
    strategy = create(config, world)
    strategy.prepare(module)
    inputs = loss_inputs(row_batch(1, 16), CPU)
    strategy.backward(strategy.forward(inputs, is_last=True), scale=1.0)
    strategy.step(1e-4, 1.0)
    after = _storages()
    return sum(storage.nbytes() for key, storage in after.items() if key not in before)


def _storages() -> dict[int, torch.UntypedStorage]:
    """Return all storages; while they are referenced, no other storage has their address."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter))
    storages = (one.untyped_storage() for one in tensors if one.device.type == "cpu")
    return {storage._cdata: storage for storage in storages}

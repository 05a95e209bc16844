"""Gradients that FSDP leaves unsharded, and the memory by which the ranks decide it together."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.strategies.fsdp import FsdpStrategy
from support.checkpoint.checkpoint_fixtures import run_processes
from support.strategies.parity import Case, build_model, case_config, inputs_of, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Bytes of unsharded gradients for each trained parameter, between two micro-batches."""
    folder = tmp_path_factory.mktemp("room")
    assert run_processes(_hold, folder, world_size=2) == [0, 0]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    found: dict[str, float] = ranks[0]
    return found


def test_unsharded_gradients_take_four_bytes_per_parameter(held: dict[str, float]) -> None:
    assert held["unsharded"] == 4.0


def test_reduced_gradients_are_sharded(held: dict[str, float]) -> None:
    assert held["reduced"] == 0.0


def test_the_ranks_agree_on_the_smallest_free_memory(held: dict[str, float]) -> None:
    assert held["smallest"] == 3 * 2**40


def _hold(group: "ProcessGroup | None", folder: Path) -> None:
    world = world_of(group)
    found: dict[str, float] = {"smallest": world.smallest([(4 - world.rank) * 2**40])[0]}
    for name, is_reduced in (("unsharded", False), ("reduced", True)):
        strategy = {"type": "fsdp", "reduce_each_micro_batch": is_reduced}
        case = Case("room", strategy, precision="bf16", rows=8)
        module = CausalLoss(build_model(case))
        trained = sum(p.numel() for p in module.parameters())
        engine = FsdpStrategy(case_config(case, folder, 2), world)
        engine.prepare(module)
        engine.backward(engine.forward(inputs_of(case, 0), is_last=False), scale=1.0)
        found[name] = _unsharded_gradients(module) / trained
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


def _unsharded_gradients(module: Any) -> int:
    """Return the bytes of gradients that are not divided among the ranks."""
    total = 0
    for part in module.modules():
        group = part._get_fsdp_state()._fsdp_param_group if hasattr(part, "unshard") else None
        for one in group.fsdp_params if group is not None else ():
            gradients = [one.unsharded_accumulated_grad]
            if hasattr(one, "_unsharded_param"):
                gradients.append(one._unsharded_param.grad)
            total += sum(g.untyped_storage().nbytes() for g in gradients if g is not None)
    return total

"""What FSDP keeps whole between micro-batches: nothing that does not fit."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.config import StrategyConfig
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.strategies.fsdp import FsdpStrategy
from finetune_trainer.strategies.fsdp_room import Sizes, Unsharded, choose_unsharded
from support.checkpoint.checkpoint_fixtures import run_processes
from support.strategies.parity import Case, build_model, case_config, inputs_of, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GIB = 2**30
SIZES = Sizes(state=10, weights=20, gradients=40)


@pytest.mark.parametrize(
    ("asked", "room", "expected"),
    [
        pytest.param({}, 70, Unsharded(weights=True, gradients=True), id="both fit"),
        pytest.param({}, 69, Unsharded(weights=True, gradients=False), id="only weights fit"),
        pytest.param({}, 29, Unsharded(weights=False, gradients=False), id="neither fits"),
        pytest.param(
            {"reshard_after_forward": True},
            50,
            Unsharded(weights=False, gradients=True),
            id="gradients fit without weights",
        ),
        pytest.param(
            {"reshard_after_forward": False, "reduce_each_micro_batch": False},
            0,
            Unsharded(weights=True, gradients=True),
            id="asked for",
        ),
        pytest.param(
            {"reduce_each_micro_batch": True},
            100,
            Unsharded(weights=True, gradients=False),
            id="asked to keep none",
        ),
    ],
)
def test_fsdp_keeps_whole_what_fits_or_is_asked_for(
    asked: dict[str, Any], room: int, expected: Unsharded
) -> None:
    settings = StrategyConfig.model_validate({"type": "fsdp", **asked})
    kept = choose_unsharded(settings, SIZES, lambda size: size <= room, accumulates=True)
    assert kept == expected


def test_without_accumulation_no_gradient_waits_for_another_micro_batch() -> None:
    kept = choose_unsharded(StrategyConfig(type="fsdp"), SIZES, lambda _: True, accumulates=False)
    assert kept == Unsharded(weights=True, gradients=False)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Bytes of whole gradients for each trained parameter, between two micro-batches."""
    folder = tmp_path_factory.mktemp("room")
    assert run_processes(_hold, folder, world_size=2) == [0, 0]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    found: dict[str, float] = ranks[0]
    return found


def test_whole_gradients_take_four_bytes_a_parameter_where_they_fit(
    held: dict[str, float],
) -> None:
    assert held["fits"] == 4.0


def test_whole_gradients_take_nothing_where_they_do_not_fit(held: dict[str, float]) -> None:
    assert held["does not fit"] == 0.0


def _hold(group: "ProcessGroup | None", folder: Path) -> None:
    world, case = world_of(group), Case("room", {"type": "fsdp"}, precision="bf16", rows=8)
    found = {}
    for name, free in (("fits", GIB), ("does not fit", 1000 if world.rank else GIB)):
        strategy = FsdpStrategy(case_config(case, folder, 2), world, partial(int, free))
        module = CausalLoss(build_model(case))
        trained = sum(p.numel() for p in module.parameters())
        strategy.prepare(module)
        strategy.backward(strategy.forward(inputs_of(case, 0), is_last=False), scale=1.0)
        found[name] = _whole_gradients(module) / trained
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


def _whole_gradients(module: Any) -> int:
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

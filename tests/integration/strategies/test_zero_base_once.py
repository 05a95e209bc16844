"""Under ZeRO-3 only rank 0 reads the base, and no rank holds more than its share of it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.config import TrainConfig
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.load import load_device, load_model
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.strategies import create
from support.checkpoint.checkpoint_fixtures import run_processes
from support.launch.launches import train_config
from support.strategies.alive import Alive, deep_model
from support.strategies.parity import Case, inputs_of, world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_and_partition(group: "ProcessGroup", folder: Path, config: TrainConfig) -> None:
    """Load as `rank` does, and count the bytes of loading and of the division."""
    from finetune_trainer.strategies import zero
    from finetune_trainer.strategies.zero_loading import partition_weights

    dividing = Alive()

    def counted(*args: Any) -> None:
        with dividing:
            partition_weights(*args)

    vars(zero)["partition_weights"] = counted
    world = world_of(group)
    strategy = create(config, world)
    with Alive() as loading:
        base = load_model(config, load_device(config, world.rank, world.device))
        torch.manual_seed(0)
        module = CausalLoss(choose_trained(base, config))
    whole = [parameter.numel() for parameter in module.parameters()]
    read = sum(parameter.numel() for parameter in module.parameters() if not parameter.is_meta)
    del base
    strategy.prepare(module)
    result = {
        "read": read,
        "loading": loading.most,
        "dividing": dividing.most,
        "whole": sum(whole),
        "largest": max(whole),
        "loss": strategy.evaluate(inputs_of(Case("", {}), 0)).item(),
    }
    torch.save(result, folder / f"{world.rank}.pt")


@pytest.mark.parametrize(
    ("method", "precision", "strategy"),
    [
        pytest.param("full", "fp32", {"offload": "cpu"}, id="full, offload"),
        pytest.param("lora", "bf16", {}, id="lora", marks=pytest.mark.full),
    ],
)
def test_a_rank_holds_its_share_and_a_few_weights_at_most(
    tmp_path: Path, method: str, precision: str, strategy: dict[str, Any]
) -> None:
    config = train_config(
        tmp_path,
        model={"path": str(deep_model(tmp_path / "model"))},
        strategy={"type": "zero3", **strategy},
        method={"type": method, "lora": {"r": 4} if method == "lora" else None},
        training={"precision": precision},
    )
    divide = partial(run_processes, load_and_partition, tmp_path, config)
    assert divide(world_size=2, deepspeed=True) == [0, 0]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    size = DTYPES[precision].itemsize
    assert [rank["read"] for rank in ranks] == [ranks[0]["whole"], 0]
    assert ranks[1]["loading"] <= 2 * 4 * ranks[1]["largest"]
    for rank in ranks:
        share = rank["whole"] * size / 2
        assert rank["dividing"] <= share + 4 * size * rank["largest"]
        assert rank["dividing"] <= 0.75 * size * rank["whole"]

    torch.manual_seed(0)
    module = CausalLoss(choose_trained(load_model(config, torch.device("cpu")), config))
    with torch.no_grad():
        expected = module.to(DTYPES[precision])(**inputs_of(Case("", {}), 0)).item()
    tolerance = 2e-3 if precision == "bf16" else 1e-6
    assert [rank["loss"] for rank in ranks] == pytest.approx([expected] * 2, rel=tolerance)

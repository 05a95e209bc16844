"""What DeepSpeed is told follows from the configuration, and what it would not do is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.strategies import create
from finetune_trainer.strategies.zero import deepspeed_config
from finetune_trainer.world import World
from support.launch.launches import train_config

ALONE = World(0, 0, 1, torch.device("cpu"))


def zero(folder: Path, stage: int = 2, **changes: Any) -> TrainConfig:
    strategy = {"type": f"zero{stage}", **changes.pop("strategy", {})}
    return train_config(folder, strategy=strategy, **changes)


def test_the_engine_is_told_batch_clipping_and_no_accumulation_of_its_own(tmp_path: Path) -> None:
    training = {"global_batch_size": 24, "micro_batch_size": 3, "max_grad_norm": 0.5}
    told = deepspeed_config(zero(tmp_path, training=training))
    assert told["train_micro_batch_size_per_gpu"] == 3
    assert told["gradient_accumulation_steps"] == 1
    assert told["train_batch_size"] == 6
    assert told["gradient_clipping"] == 0.5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_engine_is_told_the_stage_and_overlaps_on_gpus_alone(
    tmp_path: Path, stage: int
) -> None:
    on_cpu = deepspeed_config(zero(tmp_path, stage))["zero_optimization"]
    world = {"device": "cuda"}
    on_gpu = deepspeed_config(zero(tmp_path, stage, world=world))["zero_optimization"]
    assert (on_cpu["stage"], on_cpu["overlap_comm"]) == (stage, False)
    assert (on_gpu["stage"], on_gpu["overlap_comm"]) == (stage, True)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_engine_is_told_one_precision(tmp_path: Path, precision: str) -> None:
    told = deepspeed_config(zero(tmp_path, training={"precision": precision}))
    assert [name for name in ("bf16", "fp16") if told[name]["enabled"]] == (
        [] if precision == "fp32" else [precision]
    )
    assert told["communication_data_type"] == "fp32"
    assert told["fp16"]["loss_scale"] == 0, "a dynamic one"
    accumulation = told.get("data_types", {}).get("grad_accum_dtype", "fp32")
    assert accumulation == "fp32"


def test_the_engine_is_told_what_leaves_the_device(tmp_path: Path) -> None:
    nothing = deepspeed_config(zero(tmp_path))["zero_optimization"]
    always = {"stage", "overlap_comm", "contiguous_gradients", "reduce_bucket_size"}
    assert nothing.keys() == always

    some = deepspeed_config(zero(tmp_path, strategy={"offload": "optimizer"}))["zero_optimization"]
    assert some["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in some

    both = deepspeed_config(zero(tmp_path, 3, strategy={"offload": "cpu"}))["zero_optimization"]
    assert both["offload_optimizer"] == both["offload_param"] == {"device": "cpu"}

    strategy = {"offload": "nvme", "nvme_path": "/scratch"}
    config = zero(tmp_path, 3, strategy=strategy)
    disk = deepspeed_config(config, largest_parameter=6_000_001)["zero_optimization"]
    assert disk["offload_optimizer"] == {"device": "nvme", "nvme_path": "/scratch"}
    assert disk["offload_param"] == {
        "device": "nvme",
        "nvme_path": "/scratch",
        "buffer_size": 3_000_001,
    }


def test_nothing_is_left_to_the_engine(tmp_path: Path) -> None:
    assert "auto" not in repr(deepspeed_config(zero(tmp_path, 3, strategy={"offload": "cpu"})))


def test_qlora_is_refused_with_zero3(tmp_path: Path) -> None:
    method = {"type": "qlora", "lora": {}, "quantization": "nf4"}
    for offload in ("none", "cpu"):
        config = zero(tmp_path, 3, method=method, strategy={"offload": offload})
        with pytest.raises(ConfigError, match=r"^spec\.strategy\.type zero3 cannot shard"):
            create(config, ALONE)


def test_fp64_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^spec\.training\.precision fp64 has no effect"):
        create(zero(tmp_path, training={"precision": "fp64"}), ALONE)


def test_a_machine_without_deepspeed_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as the import system marks an absent one
    with pytest.raises(ConfigError, match=r"pip install finetune-operator\[deepspeed\]"):
        create(zero(tmp_path), ALONE)


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        pytest.param(20_000_000, 20_000_000, id="adapters"),
        pytest.param(8_000_000_000, 500_000_000, id="8B"),
    ],
)
def test_the_bucket_of_gradients_holds_at_most_what_is_trained(
    trained: int, expected: int, tmp_path: Path
) -> None:
    settings = deepspeed_config(zero(tmp_path), num_trained=trained)
    assert settings["zero_optimization"]["reduce_bucket_size"] == expected

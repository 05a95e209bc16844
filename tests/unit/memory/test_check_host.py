"""Host memory by moment, the refusal of a model that exceeds it, and warnings."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.memory.check_host import HostMemory, check_host_memory
from finetune_trainer.memory.read_base import read_base
from finetune_trainer.model.load import without_weights
from finetune_trainer.refusals import Refusals
from finetune_trainer.sizing.base_shape import BaseShape, BaseTensor
from finetune_trainer.sizing.fit import Gpu, Sizing
from finetune_trainer.sizing.host import host_peak
from finetune_trainer.sizing.method import with_method
from support.launch.launches import train_config
from support.memory.memory_setups import EIGHT_B

GIB = 2**30
FULL: dict[str, Any] = {"method": {"type": "full"}, "output": {"format": "merged"}}
LORA: dict[str, Any] = {
    "method": {"type": "lora", "lora": {"r": 16}},
    "output": {"format": "merged"},
}


@cache
def base() -> BaseShape:
    return read_base(without_weights(LlamaConfig(**EIGHT_B), torch.bfloat16).train())


def config_of(folder: Path, strategy: str, ranks: int = 8, **changes: Any) -> TrainConfig:
    offload = changes.pop("offload", "none")
    values = {"training": {"precision": "bf16", "global_batch_size": ranks}, **changes}
    return train_config(
        folder,
        world={"nproc_per_node": ranks},
        strategy={"type": strategy, "offload": offload},
        **values,
    )


def moments(config: TrainConfig, *, converts: bool) -> dict[str, int]:
    """Return GiB by moment; pinned memory is not rounded."""
    shape = Sizing(base(), 4096).shape(config)
    exact = "pinned_max_round_threshold_mb:0"
    found = host_peak(shape, config, converts=converts, allocator=exact).moments
    return {name: round(nbytes / GIB) for name, nbytes in found.items()}


@pytest.mark.parametrize(
    ("strategy", "changes", "converts", "expected"),
    [
        # 8.03e9 parameters are 15 GiB in 16 bits and 30 GiB in 32 bits.
        pytest.param("fsdp", FULL, True, (30, 0, 90, 135), id="FSDP"),
        pytest.param("fsdp", FULL, False, (0, 0, 90, 135), id="files are mapped"),
        pytest.param("ddp", FULL, True, (0, 0, 90, 105), id="DDP loads on the GPU"),
        pytest.param("fsdp", FULL | {"offload": "cpu"}, True, (30, 120, 209, 254), id="offload"),
        pytest.param("zero3", FULL, False, (0, 0, 179, 224), id="ZeRO copies its state twice"),
        pytest.param("fsdp", LORA, False, (0, 0, 0, 47), id="LoRA, merged in fp32"),
    ],
)
def test_the_host_memory_of_an_8b_model_by_moment(
    strategy: str,
    changes: dict[str, Any],
    converts: bool,
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    found = moments(config_of(tmp_path, strategy, **changes), converts=converts)
    assert tuple(found.values()) == expected
    assert list(found) == ["loading", "training", "checkpoint", "export"]


def test_a_model_without_known_layers_has_the_memory_of_its_weights(tmp_path: Path) -> None:
    config = config_of(tmp_path, "ddp", **LORA)
    weights = BaseTensor(name="weight", shape=(4096, 4096), is_linear=True)
    none = {"kinds": (), "order": (), "embedding": (), "head": (), "head_weight": None}
    unknown = base().model_copy(update={**none, "others": (weights,)})
    copies = 4 + 4 * 4  # all weights in fp32, and four copies of the largest
    found = host_peak(with_method(unknown, config), config)
    assert found.moments["export"] == copies * 4096**2


def warnings_of(
    config: TrainConfig,
    free: int,
    total: int,
    *,
    dtype: str | None = "bfloat16",
    is_new: bool = True,
) -> list[str]:
    warnings = list[str]()
    check_host_memory(
        config,
        HostMemory(free * GIB, total * GIB),
        Sizing(base(), 4096),
        Gpu(80 * GIB),
        settings=LlamaConfig(dtype=dtype),
        refusals=Refusals(is_new, warnings.append),
    )
    return warnings


def test_a_model_that_exceeds_the_memory_of_the_node_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "fsdp", **FULL)
    with pytest.raises(ConfigError) as refused:
        warnings_of(config, 15, 16)
    assert str(refused.value) == (
        "spec.resources: loading the model takes 29.9 GiB of host memory on the node of rank 0, "
        "which has 16.0 GiB; use nodes or limits with more memory, or spec.training.optimizer "
        "adamw8bit with spec.strategy.activationCheckpointing full, which may be enough; "
        "spec.training.checkMemory false starts anyway"
    )
    (resumed,) = warnings_of(config, 15, 16, is_new=False)
    assert resumed.endswith("this one resumes from its checkpoint")


@pytest.mark.parametrize(
    ("dtype", "free"),
    [
        pytest.param("float32", 15, id="weights are mapped from the files"),
        pytest.param(None, 15, id="the dtype of the files is unknown"),
        pytest.param("bfloat16", 31, id="it can be loaded"),
    ],
)
def test_only_the_loading_is_refused(dtype: str | None, free: int, tmp_path: Path) -> None:
    config = config_of(tmp_path, "fsdp", **FULL)
    (warning,) = warnings_of(config, free, free + 1, dtype=dtype)
    assert "exporting the model takes" in warning
    assert f"of which {free}.0 GiB are free, which may not be enough" in warning
    assert "checkMemory" not in warning


def test_a_merged_export_is_warned_about_with_the_change_that_fits(tmp_path: Path) -> None:
    config = config_of(tmp_path, "fsdp", **LORA)
    assert warnings_of(config, 64, 64) == []
    (warning,) = warnings_of(config, 40, 64)
    assert warning.endswith("use nodes or limits with more memory, or spec.output.format adapter")

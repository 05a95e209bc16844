"""Programs, models and GPUs of published runs, for planner_accuracy.py.

The differences from the trainer come from the programs' scripts; none enters the product.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from finetune_operator.planner.catalogue import GpuSize, size_of
from finetune_operator.planner.models import base_shape_of
from finetune_trainer.memory.read_base import read_base
from finetune_trainer.model.load import without_weights
from finetune_trainer.sizing.base_shape import BaseShape

Settings = dict[str, Any]


@dataclass(frozen=True)
class Stack:
    """A program whose published figures are compared.

    Attributes:
        rank: Rank of its adapters; None if the point has to state the rank.
        targets: Modules that it adapts; empty for all linear layers of the decoder.
        full_strategy: Strategy of full fine-tuning on one GPU.
        has_dropout: Whether adapters have dropout, whose mask and result autograd retains for each
            adapted product.
        holds_logits: Whether the loop holds fp32 logits until the step ends.
        bucket: Elements of a bucket of DeepSpeed 0.10, which allocates three in bf16 in backward,
            and copies the gradients twice in the optimizer's step: in bf16 and in fp32. None for
            the version of the trainer.
    """

    rank: int | None = None
    targets: tuple[str, ...] = ()
    full_strategy: str = "ddp"
    has_dropout: bool = False
    holds_logits: bool = False
    bucket: int | None = None


_STACKS = {
    # finetune.py, finetune/finetune_ds.sh, finetune_lora_single_gpu.sh and ds_config_zero2.json
    "QwenLM/Qwen": Stack(full_strategy="zero2", has_dropout=True, bucket=200_000_000),
    # train.py at 02586ac
    "AnswerDotAI/fsdp_qlora": Stack(
        rank=64,
        targets=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
        has_dropout=True,
        holds_logits=True,
    ),
}

FSDP1_CACHE = 1.272
"""Reserved by active memory with FSDP1 and LoRA: 19.36 by 15.22 GB (llama-cookbook PR 41)."""
CACHE = 1.039
"""Reserved by allocated memory without shards: 36.62 by 35.25 GiB (docs/benchmarks/gpu.json)."""


def stack_of(source: str, program: str) -> Stack | None:
    """Return the program of a point; None for other programs than Hugging Face's Trainer."""
    known = (stack for name, stack in _STACKS.items() if source.startswith(name))
    return next(known, Stack() if program.startswith("HF") else None)


def _qwen(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int) -> Settings:
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "tie_word_embeddings": False,
    }


def _mpt(hidden: int, layers: int, heads: int) -> Settings:
    return {
        "model_type": "mpt",
        "vocab_size": 50368,
        "d_model": hidden,
        "n_layers": layers,
        "n_heads": heads,
    }


# Models that are not shipped, from config.json of their repositories. The first Qwen's own code
# computes what qwen2 does. MPT: scripts/train/yamls/pretrain of mosaicml/llm-foundry.
_WIDTHS = {
    "Qwen-1.8B": _qwen(151936, 2048, 5504, 24, 16),
    "Qwen-7B": _qwen(151936, 4096, 11008, 32, 32),
    "Qwen-14B": _qwen(152064, 5120, 13696, 40, 40),
    "Qwen-72B": _qwen(152064, 8192, 24576, 80, 64),
    "MPT-1b": _mpt(2048, 24, 16),
    "MPT-3b": _mpt(2560, 32, 32),
    "MPT-7b": _mpt(4096, 32, 32),
    "MPT-13b": _mpt(5120, 40, 40),
    "MPT-30b": _mpt(7168, 48, 56),
    "MPT-70b": _mpt(8192, 80, 64),
}


@cache
def base_of(model: str) -> BaseShape | None:
    """Return the shape of a model by a name of tables, such as Llama-2-7B; None if unknown."""
    widths = dict(_WIDTHS.get(model, {}))
    if not widths:
        return base_shape_of(_shipped().get(_short(model), model))
    settings = CONFIG_MAPPING[widths.pop("model_type")](**widths)
    return read_base(without_weights(settings, torch.bfloat16).train())


@cache
def _shipped() -> dict[str, str]:
    """Return the names of shipped models on the hub by their short names."""
    models = json.loads(files("finetune_operator.planner").joinpath("models.json").read_bytes())
    return {_short(name): name for model in models for name in model["names"]}


def _short(name: str) -> str:
    own = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    return re.sub(r"(-hf|-instruct|-v0\.\d)+$", "", own)


def _card(size: str, usable: float, tflops: float, nvlink: float = 0.0) -> GpuSize:
    """Return a node with cards that Azure does not offer."""
    return replace(
        size_of(size),
        usable_gib=usable,
        half_precision_tflops=tflops,
        nvlink_gb_per_second=nvlink,
    )


# Dense peaks with fp32 sums: NVIDIA's papers on the GA102 and Ada architectures.
_GPUS: tuple[tuple[str, Callable[[], GpuSize]], ...] = (
    (r"RTX.?3090", lambda: _card("NV36ads_A10_v5", 23.7, 71)),
    (r"RTX.?4090", lambda: _card("NV36ads_A10_v5", 23.6, 165.2)),
    (r"RTX.?A6000", lambda: _card("NV36ads_A10_v5", 47.5, 154.8)),
    (r"A800", lambda: _card("ND96amsr_A100_v4", 79.1, 312, 400)),
    (r"A100.*40GB", lambda: size_of("ND96asr_v4")),
    (r"A100", lambda: size_of("ND96amsr_A100_v4")),
    (r"H100.?NVL", lambda: size_of("NC80adis_H100_v5")),
    (r"H100", lambda: size_of("ND96isr_H100_v5")),
    (r"H200", lambda: size_of("ND96isr_H200_v5")),
    (r"V100.*32GB", lambda: size_of("ND40rs_v2")),
    (r"T4", lambda: size_of("NC64as_T4_v3")),
)


def size_with(gpu: str) -> GpuSize | None:
    """Return a node with the GPU that a table names; None if its peak is not listed."""
    return next((make() for pattern, make in _GPUS if re.search(pattern, gpu)), None)

"""Verdicts about memory: properties of random configurations, and cases with published sizes."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, MixtralConfig, Phi3Config, Qwen2Config

from finetune_trainer.config import TrainConfig
from finetune_trainer.memory.read_base import read_base
from finetune_trainer.model.load import without_weights
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.fit import Gpu, Sizing, Verdict
from support.launch.launches import train_config
from support.memory.family_setups import family_settings
from support.memory.memory_setups import EIGHT_B, ONE_B

GIB = 2**30
ORDER = list(Verdict)
VOLTA = (7, 0)
SETTINGS: dict[str, Any] = {
    "Llama 1B": lambda: LlamaConfig(**ONE_B),
    "Llama 8B": lambda: LlamaConfig(**EIGHT_B),
    "Llama 70B": lambda: LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Mistral 7B": lambda: MistralConfig(sliding_window=None),
    "Phi-4": lambda: Phi3Config(
        vocab_size=100_352,
        hidden_size=5120,
        intermediate_size=17_920,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=10,
        max_position_embeddings=16_384,
    ),
    "Qwen 72B": lambda: Qwen2Config(
        vocab_size=152_064,
        hidden_size=8192,
        intermediate_size=29_568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Mixtral 8x7B": lambda: MixtralConfig(),
}
TOKENS = 4096


@cache
def base_of(name: str) -> BaseShape:
    return read_base(without_weights(SETTINGS[name](), torch.bfloat16).train())


def config_of(folder: Path, method: str, strategy: str, recompute: str, **changed: Any) -> Any:
    ranks = changed.pop("ranks", 1)
    is_full = method == "full"
    values: dict[str, Any] = {"type": method}
    if not is_full:
        values["lora"] = {"r": 16}
    if method == "qlora":
        values["quantization"] = "nf4"
    sharded = {"reshard_after_forward": True, "reduce_each_micro_batch": True}
    training = {"precision": "bf16", "compile": True, "global_batch_size": ranks}
    return train_config(
        folder,
        world={"nproc_per_node": ranks},
        method=values,
        output={"format": "merged" if is_full else "adapter"},
        strategy={
            "type": strategy,
            "activation_checkpointing": recompute,
            **(sharded if strategy == "fsdp" else {}),
        },
        training={**training, **changed},
    )


@pytest.mark.parametrize(
    ("name", "method", "strategy", "recompute", "ranks", "gib", "expected"),
    [
        pytest.param("Llama 8B", "full", "fsdp", "full", 2, 79.1, "Fits", id="8B, 2 x A100 80"),
        pytest.param("Llama 8B", "full", "fsdp", "full", 2, 39.4, "WouldNotFit", id="2 x A100 40"),
        pytest.param("Phi-4", "full", "fsdp", "full", 4, 79.1, "Fits", id="Phi-4, 4 x A100 80"),
        pytest.param("Llama 70B", "lora", "fsdp", "full", 2, 93.0, "Fits", id="70B, 2 x H100 NVL"),
        pytest.param("Llama 70B", "lora", "fsdp", "full", 16, 31.5, "Fits", id="70B, 16 x V100 32"),
        pytest.param("Qwen 72B", "lora", "ddp", "full", 4, 79.1, "WouldNotFit", id="72B whole"),
        pytest.param("Llama 8B", "lora", "ddp", "full", 1, 14.6, "WouldNotFit", id="8B LoRA, T4"),
        pytest.param("Llama 8B", "qlora", "ddp", "full", 1, 14.6, "Fits", id="8B QLoRA, T4"),
        pytest.param("Mistral 7B", "lora", "ddp", "full", 1, 15.9, "Tight", id="7B, 16 GB"),
        pytest.param("Llama 8B", "full", "ddp", "none", 1, 139.0, "Fits", id="8B, 1 x H200"),
        pytest.param("Mixtral 8x7B", "lora", "fsdp", "none", 8, 141, "Tight", id="8x7B, 8 x H200"),
        pytest.param("Mixtral 8x7B", "lora", "fsdp", "full", 8, 79.1, "Fits", id="8x7B, 8 x H100"),
    ],
)
def test_the_verdict_about_a_published_model(
    name: str,
    method: str,
    strategy: str,
    recompute: str,
    ranks: int,
    gib: float,
    expected: str,
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, method, strategy, recompute, ranks=ranks)
    gpu = Gpu(round(gib * GIB))
    sizing = Sizing(base_of(name), TOKENS)
    peak = sizing.peak(config, gpu)
    assert sizing.verdict(config, gpu) == expected, f"{peak.nbytes / GIB:.1f} GiB"


def test_more_tokens_fewer_shards_or_a_smaller_gpu_never_improve_a_verdict(tmp_path: Path) -> None:
    draw, compared = random.Random(37), 0
    names, lengths = ("Llama 1B", "Llama 8B", "Mixtral 8x7B"), (512, 1024, 2048, 4096, 8192)
    sizings = {(name, size): Sizing(base_of(name), size) for name in names for size in lengths}
    plain = {
        (method, recompute): config_of(tmp_path, method, "fsdp", recompute, ranks=8)
        for method in ("lora", "qlora", "full")
        for recompute in ("none", "selective", "full")
    }
    while compared < 5000:
        config: TrainConfig = draw.choice(list(plain.values()))
        training = {"compile": draw.choice((True, False)), "micro_batch_size": 1}
        config = config.model_copy(update={"training": config.training.model_copy(update=training)})
        name, tokens, ranks = draw.choice(names), draw.choice(lengths[:-1]), draw.choice((4, 8))
        gpu = Gpu(draw.choice((16, 24, 40, 80, 141)) * GIB, draw.choice((VOLTA, (8, 0))))
        verdict = sizings[name, tokens].verdict(on(config, ranks), gpu)
        worse = draw.choice(("tokens", "shards", "gpu"))
        after = sizings[name, 2 * tokens if worse == "tokens" else tokens].verdict(
            on(config, ranks // 2 if worse == "shards" else ranks),
            Gpu(gpu.usable // 2, gpu.capability) if worse == "gpu" else gpu,
        )
        assert ORDER.index(after) >= ORDER.index(verdict), (worse, name, tokens, ranks, gpu, config)
        compared += 1


def on(config: TrainConfig, ranks: int) -> TrainConfig:
    """Return a configuration with another number of ranks."""
    world = config.world.model_copy(update={"nproc_per_node": ranks})
    return config.model_copy(update={"world": world})


@pytest.mark.parametrize(
    ("name", "retains"),
    [
        pytest.param("gemma2", "old", id="capped scores"),
        pytest.param("gpt_oss", "both", id="attention with sinks"),
        pytest.param("llama", "none", id="torch's fused attention"),
    ],
)
def test_scores_are_retained_without_a_fused_kernel(
    name: str, retains: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "lora", "ddp", "none")
    base = read_base(without_weights(family_settings(name), torch.bfloat16).train())
    without = Sizing(base.model_copy(update={"score_bytes": 0}), 1024)
    for card, has_scores in ((VOLTA, retains != "none"), ((8, 0), retains == "both")):
        gpu = Gpu(GIB, card)
        moments, plain = (one.peak(config, gpu).moments for one in (Sizing(base, 1024), without))
        assert (moments != plain) == has_scores, card


def test_mlp_modules_of_experts_are_at_best_tight(tmp_path: Path) -> None:
    base = read_base(without_weights(family_settings("deepseek_v3"), torch.bfloat16).train())
    gpu, verdicts = Gpu(1000 * GIB), []
    for modules in ((), ("q_a_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")):
        config = config_of(tmp_path, "lora", "ddp", "none")
        lora = config.method.lora.model_copy(update={"target_modules": modules})
        method = config.method.model_copy(update={"lora": lora})
        changed = config.model_copy(update={"method": method})
        verdicts.append(Sizing(base, 1024).verdict(changed, gpu))
    assert verdicts == ["Fits", "Fits", "Tight"]


def test_zero_is_refused_only_far_above_the_memory(tmp_path: Path) -> None:
    sizing = Sizing(base_of("Llama 8B"), TOKENS)
    for strategy, gib, expected in (
        ("zero1", 40, "WouldNotFit"),
        ("zero2", 80, "Tight"),
        ("zero3", 40, "Tight"),
        ("zero3", 1000, "Tight"),
    ):
        config = config_of(tmp_path, "full", strategy, "full", ranks=8, compile=False)
        found = sizing.fit(config, Gpu(gib * GIB))
        assert found.verdict == expected, (strategy, gib, found.peak.nbytes / GIB)

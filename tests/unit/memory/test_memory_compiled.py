"""Compiled layers retain what the formula says, by the partitioner that inductor uses.

A GPU's peak is compared in tests/gpu/test_peak.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.autograd.graph import saved_tensors_hooks

from finetune_trainer.config import TrainConfig
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.layers import decoder_layers
from finetune_trainer.model.loss import base_of
from finetune_trainer.model.recompute import recompute
from finetune_trainer.sizing.peak import step_peak
from support.launch.launches import train_config
from support.memory.family_setups import family_settings
from support.memory.memory_setups import TINY, Setup
from support.memory.memory_trace import meta_model, shape_of
from support.model import grids

TOKENS = 512


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_compiled_layer_retains_the_bytes_of_the_formula(method: str, tmp_path: Path) -> None:
    assert error_of(tiny_settings, method, tmp_path) == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_compiled_layer_that_recomputes_selectively_retains_the_bytes_of_the_formula(
    method: str, tmp_path: Path
) -> None:
    error = error_of(tiny_settings, method, tmp_path, "selective")
    assert -0.06 <= error <= 0.15


@pytest.mark.skipif(not grids.IS_WHOLE, reason="takes minutes: make grids")
@pytest.mark.parametrize("how", ["none", "selective"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3", "phi3", "granite", "olmo2", "mistral", "smollm3", "ernie4_5", "cohere"],
)
def test_a_compiled_layer_of_a_family_retains_the_bytes_of_the_formula(
    name: str, method: str, how: str, tmp_path: Path
) -> None:
    def settings_of(layers: int) -> Any:
        settings = family_settings(name)
        settings.num_hidden_layers = layers
        if getattr(settings, "layer_types", None):
            settings.layer_types = settings.layer_types[:layers]
        return settings

    error = error_of(settings_of, method, tmp_path, how)
    print(f"{name} {method} {how} {error:+.1%}")
    assert -0.06 <= error <= 0.15


def tiny_settings(layers: int) -> Any:
    return Setup("", TINY, "full", layers=layers).settings()


def error_of(
    settings_of: Callable[[int], Any], method: str, folder: Path, how: str = "none"
) -> float:
    """Return the relative error of the formula for one compiled layer."""
    training = {"precision": "fp32", "compile": True}
    heads, config = [], train_config(folder)
    for layers in (2, 3):
        config = train_config(folder, **Setup("", TINY, method, how, training=training).changes())
        model = choose_trained(meta_model(settings_of(layers), config), config)
        peak = step_peak(shape_of(settings_of(layers), config), config, tokens=TOKENS)
        heads.append(peak.moments["head"] - peak.static)
    return (heads[1] - heads[0]) / retained_by_last_layer(model, config) - 1


def retained_by_last_layer(model: Any, config: TrainConfig) -> int:
    """Return the bytes that autograd retains for the last layer, but its weights."""
    model.to_empty(device="cpu")
    recompute(base_of(model), config.strategy.activation_checkpointing)
    layer = decoder_layers(base_of(model))[-1]
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
    )
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(1, TOKENS, base_of(model).config.hidden_size, requires_grad=True)
    places = torch.arange(TOKENS)[None]
    with torch.no_grad():
        angles = base_of(model).model.rotary_emb(hidden, places)
    torch.compiler.reset()  # otherwise sizes become dynamic, and more is retained
    compiled: Any = torch.compile(layer, backend=backend)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = compiled(hidden, position_embeddings=angles)
    assert output.requires_grad
    return sum(saved.values()) - sum(part.untyped_storage().nbytes() for part in angles)

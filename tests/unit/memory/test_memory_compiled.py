"""Compiled layers retain what the formula says, by the partitioner that inductor uses.

A GPU's peak is compared in tests/gpu/test_peak.py.
"""

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
from finetune_trainer.sizing.peak import step_peak
from support.launch.launches import train_config
from support.memory.memory_setups import TINY, Setup
from support.memory.memory_trace import meta_model, shape_of

TOKENS = 512


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_compiled_layer_retains_the_bytes_of_the_formula(method: str, tmp_path: Path) -> None:
    training = {"precision": "fp32", "compile": True}
    heads, config = [], train_config(tmp_path)
    for layers in (2, 3):
        setup = Setup("", TINY, method, layers=layers, training=training)
        config = train_config(tmp_path, **setup.changes())
        model = choose_trained(meta_model(setup.settings(), config), config)
        peak = step_peak(shape_of(setup.settings(), config), config, tokens=TOKENS)
        heads.append(peak.moments["head"] - peak.static)
    assert heads[1] - heads[0] == pytest.approx(retained_by_last_layer(model, config), rel=0.03)


def retained_by_last_layer(model: Any, config: TrainConfig) -> int:
    """Return the bytes that autograd retains for the last layer, but its weights."""
    model.to_empty(device="cpu")
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

    hidden = torch.randn(1, TOKENS, TINY["hidden_size"], requires_grad=True)
    places = torch.arange(TOKENS)[None]
    with torch.no_grad():
        angles = base_of(model).model.rotary_emb(hidden, places)
    compiled: Any = torch.compile(layer, backend=backend)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = compiled(hidden, position_embeddings=angles)
    assert output.requires_grad
    return sum(saved.values()) - sum(part.untyped_storage().nbytes() for part in angles)

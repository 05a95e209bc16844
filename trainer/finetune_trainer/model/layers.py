"""Find the decoder layers of a transformers model, independent of their names."""

from typing import Any

from torch import nn


def decoder_layers(base: Any) -> list[nn.Module]:
    """Return the layers between embedding and head in order; empty if they are not in a list."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    for part in (decoder, base):  # the layers of a vision tower come before the decoder's
        for module in () if part is None else part.modules():
            layers = list(module) if isinstance(module, nn.ModuleList) else []
            if layers and all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
                return layers
    return []

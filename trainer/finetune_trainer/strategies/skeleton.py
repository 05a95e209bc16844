"""A model without weights, kept beside the sharded one, that whole weights are put into.

Engines hook into the module they shard, so a whole model cannot be made from that one.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def empty_copy(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters are on the meta device; call it before an engine does."""
    memo: dict[int, Tensor] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in model.buffers()}
    empty = copy.deepcopy(model, memo)
    for module in empty.modules():
        if (
            scales := getattr(module, "quant_state", None)
        ) is not None:  # no buffers of a 4-bit layer
            scales.to("cpu")
    return empty


def filled(skeleton: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the skeleton with `weights` in its own types; tied ones stay tied.

    Those of its types already are not copied.
    """
    memo = {
        id(p): nn.Parameter(weights[name].to(p.dtype), requires_grad=p.requires_grad)
        for name, p in skeleton.named_parameters()
    }
    return copy.deepcopy(skeleton, memo)

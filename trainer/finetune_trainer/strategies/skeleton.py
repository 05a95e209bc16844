"""Copy a model without weights before it is sharded, and fill the copy with gathered weights.

Engines add hooks to the module that they shard, so that module cannot become a whole model again.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from finetune_trainer.model.quantize import stored_as


def empty_copy(model: nn.Module) -> nn.Module:
    """Return a copy with parameters on the meta device; must be called before an engine shards."""
    memo: dict[int, Tensor] = {}
    for p in model.parameters():
        shape, dtype = stored_as(p)
        empty = torch.empty(shape, dtype=dtype, device="meta")
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    memo |= {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in model.buffers()}
    skeleton = copy.deepcopy(model, memo)
    for module in skeleton.modules():
        if (
            scales := getattr(module, "quant_state", None)
        ) is not None:  # scales of a 4-bit layer are not buffers
            scales.to("cpu")
    return skeleton


def filled(skeleton: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the skeleton with `weights` in its own dtypes; tied weights stay tied.

    Weights that already have the right dtype are not copied. Parameters without a weight stay on
    the meta device.
    """
    memo = {
        id(p): nn.Parameter(weights[name].to(p.dtype), requires_grad=p.requires_grad)
        for name, p in skeleton.named_parameters()
        if name in weights
    }
    return copy.deepcopy(skeleton, memo)

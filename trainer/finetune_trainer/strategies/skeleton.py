"""Copy a model without weights before it is sharded, and fill the copy with gathered weights.

Engines add hooks to the module that they shard, so that module cannot become a whole model again.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from finetune_trainer.errors import TrainerError
from finetune_trainer.model.quantize import stored_as
from finetune_trainer.world import World, gather_values


def empty_copy(model: nn.Module, trained_dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy with parameters on the meta device; must be called before an engine shards.

    Args:
        model: Model, whose weights may be quantised.
        trained_dtype: Dtype of trained parameters in the copy; by default unchanged.
    """
    memo: dict[int, Tensor] = {}
    for p in model.parameters():
        shape, dtype = stored_as(p)
        if p.requires_grad and trained_dtype is not None:
            dtype = trained_dtype
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


def move_to_meta(module: nn.Module, world: World) -> None:
    """Move every parameter to the meta device, with its shape and dtype on rank 0."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    stored = {name: stored_as(parameter) for parameter, name in names.items()}
    own = {name: (list(shape), str(dtype)) for name, (shape, dtype) in stored.items()}
    whole = gather_values(world.control_group, own, dict[str, tuple[list[int], str]])[0]
    if own.keys() != whole.keys():
        different = sorted(own.keys() ^ whole.keys())
        raise TrainerError(
            f"rank {world.rank} has built another model than rank 0 (first {different[0]}); use "
            "spec.strategy.type ddp or zero2 for this model"
        )
    dtypes = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    empty = {
        parameter: nn.Parameter(
            torch.empty(whole[name][0], dtype=dtypes[whole[name][1]], device="meta"),
            requires_grad=parameter.requires_grad,
        )
        for parameter, name in names.items()
    }
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, empty[parameter])

"""Partition the weights of rank 0 for ZeRO-3 before the engine starts.

`zero` calls it. The engine itself would first copy the whole model to every device. Here the other
ranks have no weights, and no device holds more than its partitions and a few weights.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune_trainer.strategies.skeleton import move_to_meta
from finetune_trainer.world import World


def partition_weights(
    module: nn.Module, settings: dict[str, Any], dtype: torch.dtype, world: World
) -> None:
    """Replace all parameters of `module` by partitioned ones with rank 0's values; a collective.

    Args:
        module: Module on every rank; only rank 0 needs weights.
        settings: DeepSpeed's configuration.
        dtype: Dtype to which the engine would cast all parameters.
        world: The ranks.

    Raises:
        TrainerError: a rank has built another model than rank 0.
    """
    weights: dict[str, Tensor] = dict(module.named_parameters())
    move_to_meta(module, world)
    _broadcast_buffers(module, world)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for part in module.modules():
        for leaf, parameter in part.named_parameters(recurse=False):
            owners[parameter].append((part, leaf))
    partition: Any = None
    for name, parameter in list(module.named_parameters()):
        own = weights.pop(name).detach()
        whole = own.to("cpu", dtype) if world.is_main else torch.empty(own.shape, dtype=dtype)
        new = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for part, leaf in owners[parameter]:  # tied weights have several
            setattr(part, leaf, new)
        if partition is None:
            partition = _partition_first(new, settings, dtype)
        else:
            partition([new])


def _partition_first(parameter: nn.Parameter, settings: dict[str, Any], dtype: torch.dtype) -> Any:
    """Partition the first parameter; return the function that partitions further ones alike.

    The function shares DeepSpeed's swapper to disk, which allocates its buffers once.
    """
    from deepspeed import zero

    holder = nn.Module()
    holder.first = parameter
    zero.Init(module=holder, config_dict_or_path=settings, dtype=dtype)
    return parameter.convert_to_zero_parameters  # type: ignore[attr-defined]


def _broadcast_buffers(module: nn.Module, world: World) -> None:
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            there = torch.empty_like(buffer, device=world.device)
            if world.is_main:
                there.copy_(buffer)
            dist.broadcast(there, src=0)
            setattr(part, name, there)

"""The order in which a model is made ready for its ranks: recompute, compile, shard.

Called by each strategy with its own way to shard. Recomputation is set first, so that it lies in
the compiled graph, where the compiler sees both passes. Sharding comes last, so that the engine's
hooks, which gather weights and wait for ranks, stay outside of the graphs. What divides single
matrices (tensor parallelism) would come before both, on a dimension of the mesh of its own; a
frozen second model (DPO) goes through here like the first.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from finetune_trainer.config import TrainConfig
from finetune_trainer.model.compile import compile_layers
from finetune_trainer.model.loss import CausalLoss, base_of
from finetune_trainer.model.recompute import recompute

Built = TypeVar("Built")
Shard = Callable[[CausalLoss, DeviceMesh | None], Built]
"""Wraps or shards the module over the named dimensions of a mesh; None is one rank alone."""


def parallelize(
    module: CausalLoss,
    mesh: DeviceMesh | None,
    config: TrainConfig,
    shard: Shard[Built],
    warn: Callable[[str], None],
) -> Built:
    """Change the module as `config` asks, and return what `shard` makes of it.

    Args:
        module: Around the model as it was loaded and adapted.
        mesh: Dimensions by name: `replica` holds the same weights, `shard` divides them.
        config: Says which activations are recomputed and whether layers are compiled.
        shard: The strategy's own.
        warn: Told once where layers cannot be compiled and nobody asked for it.

    Raises:
        ConfigError: something that was asked for cannot work with this model or device.
    """
    base = base_of(module.model)
    recompute(base, config.strategy.activation_checkpointing)
    if config.training.compile:
        device = torch.device(config.world.device)
        compile_layers(base, device, is_asked=config.training.is_compile_asked, warn=warn)
    return shard(module, mesh)

"""Prepare a model for its ranks in this order: recompute, compile, shard.

Called by each strategy with its own sharding. Recomputation comes first, so that it is part of
the compiled graph and the compiler sees both passes. Sharding comes last, so that the engine's
hooks, which gather weights and wait for ranks, stay outside of the graphs. Tensor parallelism,
which splits single matrices, would come before both, on its own dimension of the mesh; a frozen
second model (DPO) would be prepared here like the first.
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
    """Prepare the module as configured and return the result of `shard`.

    Args:
        module: Wraps the loaded model with its adapters.
        mesh: Dimensions by name: `replica` holds the same weights, `shard` divides them.
        config: Selects the recomputed activations and whether layers are compiled.
        shard: The strategy's function.
        warn: Receives one message if layers cannot be compiled and compiling is only the default.

    Raises:
        ConfigError: this model or device cannot do what the configuration requests.
    """
    base = base_of(module.model)
    recompute(base, config.strategy.activation_checkpointing)
    if config.training.compile:
        device = torch.device(config.world.device)
        compile_layers(base, device, is_asked=config.training.is_compile_asked, warn=warn)
    return shard(module, mesh)

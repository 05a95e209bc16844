"""Fully sharded data parallel (FSDP2): every parameter, gradient and moment is sharded.

Decoder layers, embedding and head are gathered one by one just before their use. All other
parameters belong to the loss module around the model, whose forward is the only entry point.
"""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError, TrainerError, WorldSizeError
from finetune_trainer.memory.host import (
    allocator_settings,
    free_host_memory,
    refuse_pinning,
)
from finetune_trainer.model.float8 import undo_float8
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.model.quantize import broadcast_quant_states
from finetune_trainer.sizing.host import pinned_nbytes
from finetune_trainer.sizing.method import is_loaded_once
from finetune_trainer.strategies.fsdp_groups import Groups, choose_groups, set_prefetch
from finetune_trainer.strategies.optimizer import COMPUTE_DTYPES, NativeOptimizer, NativeStrategy
from finetune_trainer.strategies.parallelize import parallelize
from finetune_trainer.strategies.rounding import rounding_warning
from finetune_trainer.strategies.skeleton import empty_copy, filled, move_to_meta
from finetune_trainer.world import World, set_group_timeouts


class FsdpStrategy(NativeStrategy):
    """`torch.distributed.fsdp.fully_shard` on every group, and on the loss module."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        """Create the mesh; settings of `config.strategy` that are None shard everything."""
        super().__init__(config, world)
        self._mesh = _mesh(config, world)
        self._groups: Groups
        self._sharded: list[FSDPModule]
        self._skeleton: nn.Module | None = None
        self._retains_weights = config.strategy.reshard_after_forward is False
        accumulates = config.gradient_accumulation_steps > 1
        self._retains_gradients = accumulates and config.strategy.reduce_each_micro_batch is False

    def prepare(self, module: CausalLoss, warn: Callable[[str], None] = warnings.warn) -> None:
        """Shard the module, create the optimizer, and verify the result against the config.

        Raises:
            ConfigError: the model has no layers to shard, or the dtype of its trained parameters
                does not match the precision.
            WorldSizeError: the mesh has another number of ranks than the configuration.
        """
        self._module = module
        if self._world.is_main:
            self._skeleton = empty_copy(module.model)
            if self._config.training.float8:  # which the host's CPU lacks
                undo_float8(self._skeleton)
        if is_loaded_once(self._config):
            weights: dict[str, Tensor] = dict(module.named_parameters())
            move_to_meta(module, self._world)
            self._sharded = parallelize(module, self._mesh, self._config, self._shard, warn)
            self._scatter(weights)
            broadcast_quant_states(module.model, self._skeleton, self._world)
        else:
            self._sharded = parallelize(module, self._mesh, self._config, self._shard, warn)
        self._verify()
        shards = self._mesh["shard"].get_group()
        training, device = self._config.training, self._world.device
        self._groups.arrange(retains_weights=self._retains_weights)
        set_prefetch(self._sharded[:-1], self._config.strategy.prefetch)
        self._optimizer = NativeOptimizer(self.model, training, device, shards, warn)
        sentence = rounding_warning(self._config, adds_up_whole=self._retains_gradients)
        if sentence is not None:
            warn(sentence)

    def forward(self, inputs: dict[str, Tensor], *, is_last: bool) -> Tensor:
        """Run the forward pass; unsharded gradients are reduced after the last micro-batch.

        Otherwise gradients are reduce-scattered after each micro-batch, and only the reduction over
        replicas waits for the last one.
        """
        root = self._sharded[-1]
        root.set_requires_gradient_sync(is_last or not self._retains_gradients)
        root.set_requires_all_reduce(is_last)
        # Retained weights are gathered once for all micro-batches of a step.
        root.set_reshard_after_backward(is_last or not self._retains_weights)
        loss_sum: Tensor = self._module(**inputs)
        return loss_sum

    def evaluate(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of one batch; all ranks must call this equally often."""
        with torch.no_grad():
            loss_sum: Tensor = self._module(**inputs)
        return loss_sum

    def load_state(self, state: dict[str, Any]) -> None:
        """Free gathered weights: a restore has written into the shards, so they are stale."""
        self._reshard()

    def whole_model(self, *, trained_only: bool = False) -> nn.Module | None:
        """Return a copy in host memory on rank 0, gathered one tensor at a time."""
        self._reshard()
        weights = {}
        for name, parameter in self.model.named_parameters():
            if trained_only and not parameter.requires_grad:
                continue
            whole = parameter.detach().to(self._world.device)
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            if self._world.is_main:
                weights[name] = whole.cpu()
        if self._skeleton is None:
            return None
        return filled(self._skeleton, weights).train(self.model.training)

    def _shard(self, module: CausalLoss, mesh: DeviceMesh | None) -> list[FSDPModule]:
        """Shard each group, then the module itself; return them in this order."""
        param_dtype = COMPUTE_DTYPES.get(self._config.training.precision)
        reduce_dtype = torch.float32 if param_dtype else None
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        offload = OffloadPolicy()
        if self._config.strategy.offload == "cpu":
            offload = CPUOffloadPolicy(pin_memory=self._world.device.type == "cuda")
            if self._world.device.type == "cuda":
                self._refuse_to_pin(module)
        self._groups = choose_groups(module)
        return [
            fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)
            for part in (*self._groups.in_order, module)
        ]

    def _refuse_to_pin(self, module: CausalLoss) -> None:
        """Refuse offloaded parameters and gradients that exceed the host memory to pin."""
        shards, settings = self._mesh["shard"].size(), allocator_settings()
        size = 0
        for p in module.parameters():
            rows = -(-p.shape[0] // shards)
            nbytes = p.element_size() * rows * (p.numel() // p.shape[0])
            size += pinned_nbytes(nbytes, settings) * (1 + p.requires_grad)
        ranks = self._config.world.nproc_per_node
        refuse_pinning(size, ranks, free_host_memory(), "spec.strategy.offload cpu")

    def _scatter(self, weights: dict[str, Tensor]) -> None:
        """Distribute rank 0's weights over the ranks, freeing them one by one.

        No other rank ever has the whole model, and no device more than its shard and one weight.
        """
        world, offloads = self._world, self._config.strategy.offload == "cpu"
        home = torch.device("cpu") if offloads else world.device
        self._module._apply(  # type: ignore[no-untyped-call]  # to_empty forgets buffers as well
            lambda t: torch.empty_like(t, device=home) if t.is_meta else t
        )
        for buffer in self._module.buffers():
            dist.broadcast(buffer, src=0)
        for name, parameter in self._module.named_parameters():
            shard = cast(DTensor, parameter.detach())
            own = weights.pop(name)
            if world.is_main:
                # The move quantises 4-bit weights.
                whole = own.to(world.device).detach().as_subclass(Tensor)
            else:
                whole = torch.empty(shard.shape, dtype=shard.dtype, device=world.device)
            part = distribute_tensor(whole, shard.device_mesh, shard.placements)
            shard.to_local().copy_(part.to_local())

    def _verify(self) -> None:
        expected = self._config.world.world_size
        if self._mesh.size() != expected:
            raise WorldSizeError(
                f"FSDP was built over {self._mesh.size()} ranks, not {expected}; check the launcher"
            )
        whole = [n for n, p in self._module.named_parameters() if not isinstance(p, DTensor)]
        plain = [m for m in self._sharded if not isinstance(m, FSDPModule)]
        if whole or plain:
            raise TrainerError(
                f"FSDP left {len(whole)} parameters (first {whole[:1]}) and {len(plain)} modules "
                "unsharded; this version of torch cannot be used"
            )

    def _reshard(self) -> None:
        """Free the weights that an evaluation has left gathered."""
        for part in self._sharded:
            part.reshard()


def refuse_unsupported(config: TrainConfig) -> None:
    """Refuse worlds that cannot be divided into shards.

    Raises:
        ConfigError: Names the setting to change.
    """
    replicas, size = config.strategy.replicas, config.world.world_size
    if size == 1:
        if not config.checkpoint.is_continued:
            raise ConfigError(
                "spec.strategy.type fsdp needs at least two processes; use ddp, which is "
                "equivalent with one"
            )
    elif size % replicas or size == replicas:
        raise ConfigError(
            f"spec.strategy.replicas {replicas} does not divide {size} processes into groups of "
            "at least two; use another number, or ddp, in which every process has the whole model"
        )


def _mesh(config: TrainConfig, world: World) -> DeviceMesh:
    """Return the ranks as replicas x shards."""
    replicas, size = config.strategy.replicas, world.world_size
    if size == 1:
        replicas = 1
        if not dist.is_initialized():  # a mesh needs a process group even for one process
            backend = "nccl" if world.device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if replicas == 1:
        return init_device_mesh(world.device.type, (size,), mesh_dim_names=("shard",))
    shape, names = (replicas, size // replicas), ("replica", "shard")
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    set_group_timeouts(config, *(mesh[name].get_group() for name in names))
    return mesh

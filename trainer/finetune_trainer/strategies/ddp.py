"""Distributed data parallel: every rank has the whole model, and gradients are averaged.

A single rank trains the plain module without DDP.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from finetune_trainer.errors import WorldSizeError
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.strategies.optimizer import COMPUTE_DTYPES, NativeOptimizer, NativeStrategy
from finetune_trainer.strategies.parallelize import parallelize
from finetune_trainer.strategies.rounding import rounding_warning


class DdpStrategy(NativeStrategy):
    """`torch.nn.parallel.DistributedDataParallel` around the loss module."""

    _wrapped: nn.Module

    def prepare(self, module: CausalLoss, warn: Callable[[str], None] = warnings.warn) -> None:
        """Wrap the module and create the optimizer.

        Raises:
            ConfigError: the dtype of the trained parameters does not match the precision.
            WorldSizeError: the process group has another number of ranks than the configuration.
        """
        self._module, mesh = module, None
        if self._world.group is not None:
            kind = self._world.device.type
            mesh = DeviceMesh.from_group(self._world.group, kind, mesh_dim_names=("replica",))
        self._wrapped = parallelize(module, mesh, self._config, self._wrap, warn)
        training, device = self._config.training, self._world.device
        self._optimizer = NativeOptimizer(self.model, training, device, warn=warn)
        if (sentence := rounding_warning(self._config)) is not None:
            warn(sentence)

    def forward(self, inputs: dict[str, Tensor], *, is_last: bool) -> Tensor:
        """Run the forward pass; gradients are averaged in the backward of the last micro-batch."""
        wrapped = self._wrapped
        no_sync = isinstance(wrapped, DistributedDataParallel) and not is_last
        with wrapped.no_sync() if no_sync else nullcontext(), self._autocast():  # type: ignore[operator]
            loss_sum: Tensor = wrapped(**inputs)
        return loss_sum

    def evaluate(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of one batch; ranks may call this a different number of times."""
        with torch.no_grad(), self._autocast():
            loss_sum: Tensor = self._module(**inputs)
        return loss_sum

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing: a restore has written into the live tensors."""

    def whole_model(self, *, trained_only: bool = False) -> nn.Module | None:
        """Return the model on rank 0; every rank has the whole model."""
        return self.model if self._world.is_main else None

    def _wrap(self, module: CausalLoss, mesh: DeviceMesh | None) -> nn.Module:
        if mesh is None:
            return module
        wrapped = DistributedDataParallel(
            module,
            process_group=mesh.get_group("replica"),
            gradient_as_bucket_view=True,
            # Every rank computes the same buffers; syncing them would cost a collective per step.
            forward_sync_buffers=False,
        )
        built = wrapped.process_group.size()
        if built != self._config.world.world_size:
            raise WorldSizeError(
                f"DDP was built over {built} ranks, not {self._config.world.world_size}; "
                "check the launcher"
            )
        return wrapped

    def _autocast(self) -> torch.autocast:
        dtype = COMPUTE_DTYPES.get(self._config.training.precision)
        return torch.autocast(self._world.device.type, dtype=dtype, enabled=dtype is not None)

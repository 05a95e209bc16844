"""Define the interface between the loop and a strategy.

A new engine is a new module that implements this protocol; the loop does not depend on engines.
"""

import warnings
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from finetune_trainer.config import TrainConfig
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.world import World


class Strategy(Protocol):
    """A model distributed over all ranks: forward, backward, clip, step, state."""

    def __init__(self, config: TrainConfig, world: World) -> None: ...

    def prepare(self, module: CausalLoss, warn: Callable[[str], None] = warnings.warn) -> None:
        """Parallelize the module, create the optimizer, and verify the result against the config.

        `warn` receives a message if a default (not an explicit request) is unavailable.
        """

    def forward(self, inputs: dict[str, Tensor], *, is_last: bool) -> Tensor:
        """Run the forward pass of one micro-batch; `backward` must follow.

        Args:
            inputs: Keyword arguments of `CausalLoss.forward`.
            is_last: Whether this is the last micro-batch of the step, which reduces the gradients.

        Returns:
            The unscaled summed loss of this rank.
        """

    def backward(self, loss_sum: Tensor, *, scale: float) -> None:
        """Run the backward pass of the last `forward`.

        Args:
            loss_sum: Result of `forward`.
            scale: Factor on the loss before backward (`model.loss.scale_factor`).
        """

    def step(self, learning_rate: float, max_norm: float) -> Tensor:
        """Clip, update the parameters and clear the gradients, without a host sync.

        Args:
            learning_rate: Learning rate of this step.
            max_norm: Gradients are scaled down to this global norm; 0 disables clipping.

        Returns:
            The global gradient norm before clipping, an fp32 scalar on the device, the same on
            every rank. If it is not finite, no rank has updated its parameters.
        """

    def evaluate(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of one batch without gradients; a collective when sharded."""

    def state(self) -> dict[str, Any]:
        """Return trained parameters and optimizer state under the unwrapped model's names.

        `{"model": {name: tensor}, "optimizer": {"name.exp_avg": tensor, ...}}`, with the shapes of
        the unsharded tensors (a `DTensor` if a rank has a part), so that any strategy on any number
        of ranks can read the state of another. Frozen parameters are omitted: the checkpoint's
        fingerprint identifies their base model. With fp16, `scaler` has the state of the loss
        scale.
        """

    def load_state(self, state: dict[str, Any]) -> None:
        """Apply the values that a restore wrote into the tensors of `state`."""

    def whole_model(self, *, trained_only: bool = False) -> nn.Module | None:
        """Return the unwrapped, unsharded model on rank 0 and None elsewhere; a collective.

        For sample generation and export. The model may share weights with the trained one, so
        callers must not change it.

        Args:
            trained_only: A sharding strategy gathers trained parameters alone; frozen ones are on
                the meta device.
        """

    @property
    def model(self) -> nn.Module:
        """The unwrapped transformers or peft model, whose parameters may be sharded."""

"""What the loop asks of a strategy.

A new engine is a new file that keeps this protocol; the loop never learns its name.
"""

import warnings
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from finetune_trainer.config import TrainConfig
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.world import World


class Strategy(Protocol):
    """One model shared by all ranks: forward, backward, clip, step, state."""

    def __init__(self, config: TrainConfig, world: World) -> None: ...

    def prepare(self, module: CausalLoss, warn: Callable[[str], None] = warnings.warn) -> None:
        """Parallelize the module, make the optimizer, and assert that what was asked was built.

        `warn` is told what cannot be had that was only a default.
        """

    def forward(self, inputs: dict[str, Tensor], *, is_last: bool) -> Tensor:
        """Run the forward pass of one micro-batch; `backward` must follow.

        Args:
            inputs: Keyword arguments of `CausalLoss.forward`.
            is_last: The last micro-batch of the step; only now do gradients travel.

        Returns:
            The unscaled summed loss of this rank.
        """

    def backward(self, loss_sum: Tensor, *, scale: float) -> None:
        """Run the backward pass of what `forward` has returned.

        Args:
            loss_sum: Its loss.
            scale: Factor on it before backward (`model.loss.scale_factor`).
        """

    def step(self, learning_rate: float, max_norm: float) -> Tensor:
        """Clip, update the parameters, clear the gradients; never waits for the device.

        Args:
            learning_rate: Of this step.
            max_norm: Gradients are scaled down to this global norm; 0 leaves them.

        Returns:
            The global gradient norm before clipping, a scalar in fp32 on the device, the same on
            every rank. One that is not finite says that no rank has updated anything.
        """

    def evaluate(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of one batch without gradients; a collective when sharded."""

    def state(self) -> dict[str, Any]:
        """Return trained parameters and optimizer state under the unwrapped model's names.

        `{"model": {name: tensor}, "optimizer": {"name.exp_avg": tensor, ...}}`, shaped like the
        unsharded ones (a `DTensor` where a rank holds a part), so that any strategy on any number
        of ranks reads what another one wrote. Frozen parameters are left out: the base they come
        from is identified by the checkpoint's fingerprint. With fp16 `scaler` holds what the loss
        scale needs.
        """

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what a restore wrote into the tensors that `state` returned."""

    def whole_model(self) -> nn.Module | None:
        """Return the unwrapped model with whole weights on rank 0, None elsewhere; a collective.

        For answers and export. It may share weights with what is trained: read it only.
        """

    @property
    def model(self) -> nn.Module:
        """The unwrapped transformers or peft model, its parameters perhaps sharded."""

"""What the loop asks of a strategy, and the optimizer every strategy shares.

A new engine is a new file that keeps this protocol; the loop never learns its name.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from finetune_trainer.config import TrainConfig, TrainingConfig
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.world import World


class Strategy(Protocol):
    """One model shared by all ranks: forward, backward, clip, step, state."""

    def __init__(self, config: TrainConfig, world: World) -> None: ...

    def prepare(self, module: CausalLoss) -> None:
        """Wrap the module, make the optimizer, and assert the engine built what was asked."""

    def backward(self, inputs: dict[str, Tensor], *, scale: float, is_last: bool) -> Tensor:
        """Run forward and backward of one micro-batch.

        Args:
            inputs: Keyword arguments of `CausalLoss.forward`.
            scale: Factor on the summed loss before backward (`model.loss.scale_factor`).
            is_last: The last micro-batch of the step; only now do gradients travel.

        Returns:
            The unscaled summed loss of this rank, detached.
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
        from is identified by the checkpoint's fingerprint.
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


def make_optimizer(module: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """Make AdamW (arXiv:1711.05101) over the trained parameters, its state already there.

    Vectors (norms, biases) are not decayed. The state is created now, not at the first step, so
    that a checkpoint can be read into it in place before any step was made.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=training.learning_rate, fused=True
    )
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def training_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return `{"model": {name: tensor}, "optimizer": {"name.exp_avg": tensor, ...}}`, live.

    Frozen parameters are left out: the base they come from is identified by the checkpoint's
    fingerprint. Names are those of the unwrapped module, so any strategy can read them.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    moments = {
        f"{name}.{key}": value
        for name, parameter in trained.items()
        for key, value in optimizer.state[parameter].items()
    }
    return {"model": {n: p.detach() for n, p in trained.items()}, "optimizer": moments}

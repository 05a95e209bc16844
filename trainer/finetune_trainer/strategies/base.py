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

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients down to `max_norm` (0: leave them) and return their global norm."""

    def step(self, learning_rate: float) -> None:
        """Update the parameters and clear the gradients."""

    def evaluate(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of one batch without gradients."""

    def state(self) -> dict[str, Any]:
        """Return live trained parameters and optimizer state, for saving and in-place restore."""

    @property
    def model(self) -> nn.Module:
        """The unwrapped transformers or peft model, for answers and for export."""


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

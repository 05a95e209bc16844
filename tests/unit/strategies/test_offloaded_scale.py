"""What the optimizer's kernel reads, where parameters are on the host and norms on a GPU.

Torch's `meta` device stands for the GPU: what is copied from it to the host, and how, is noted.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune_trainer.config import TrainingConfig
from finetune_trainer.strategies.optimizer import NativeOptimizer

TRAINING = TrainingConfig(global_batch_size=1, max_steps=1, learning_rate=1e-3, precision="fp16")
GPU = torch.device("meta")


class Copies(TorchDispatchMode):
    """Lets copies to the host arrive as ones, and notes which of them nobody waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: list[bool] = []
        self.scales: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten._fused_adamw_.default:
            self.scales += [named["grad_scale"], named["found_inf"]]
        is_copy = func is torch.ops.aten._to_copy.default and args[0].device == GPU
        if is_copy and named.get("device") == torch.device("cpu"):
            self.waited_for.append(not named.get("non_blocking", False))
            return torch.ones(args[0].shape)
        return func(*args, **named)


def test_with_offloaded_parameters_the_kernel_reads_a_scale_that_has_arrived_on_the_host() -> None:
    model = nn.Linear(4, 4)
    optimizer = NativeOptimizer(model, TRAINING, GPU)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Copies() as copies:
        optimizer.step(1e-3, 1.0)
    assert copies.scales, "the fused kernel was called"
    assert {one.device.type for one in copies.scales} == {"cpu"}
    assert copies.waited_for, "norm and scale are computed on the GPU"
    assert all(copies.waited_for)

"""Optimizer of the native strategies: AdamW, clipping and fp16's loss scale, without host syncs.

The update is torch's, or `adamw8bit`. One kernel unscales, clips and updates, or skips the update
if a gradient of any rank is not finite. Every rank computes the same norm, so all ranks make the
same decision.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from finetune_trainer.config import TrainConfig, TrainingConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.strategies.adamw8bit import AdamW8bit
from finetune_trainer.world import World

# Compute dtype of forward and backward, if it differs from the trained parameters' dtype.
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_LOSS_SCALE = 65_536.0
# Steps without overflow before fp16's loss scale doubles; an overflow halves it at once.
GROWTH_INTERVAL = 2_000


class NativeOptimizer:
    """Optimizes the trained parameters of a model with the gradients in `grad`."""

    def __init__(
        self,
        model: nn.Module,
        training: TrainingConfig,
        device: torch.device,
        shards: "dist.ProcessGroup | None" = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Create the optimizer and its state, so that a checkpoint can be read into it in place.

        Args:
            model: Parameters are plain tensors, or `DTensor`s sharded over `shards`.
            training: Settings of the optimizer.
            device: Device of norm and loss scale.
            shards: Ranks that share the gradients; None if every rank has whole gradients.
            warn: Receives a message if the update cannot be compiled.

        Raises:
            ConfigError: the dtype of a trained parameter does not match the precision.
        """
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._device = device
        # If parameters are offloaded, the kernel that reads the scale runs on the host. Torch would
        # copy the scale without a sync (`torch.optim.adam._fused_adam`), and the kernel could read
        # stale memory. `_update` copies it first, with a host sync.
        self._parameter_device = next((p.device for p in self._trained.values()), device)
        self._shards = shards
        self._is_scaled = training.precision == "fp16"
        self._scale = torch.tensor(FIRST_LOSS_SCALE if self._is_scaled else 1.0, device=device)
        self._good_steps = torch.tensor(0.0, device=device)
        _expect_dtype(self._trained, training)
        self._adamw: torch.optim.AdamW | AdamW8bit
        if training.optimizer == "adamw8bit":
            self._adamw = make_adamw8bit(self._trained, training, warn)
        else:
            self._adamw = make_adamw(self._trained, training)
            for parameter in self._trained.values():
                self._adamw.state[parameter] = fresh_state(parameter)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss for backward: with fp16, scaled so that gradients do not underflow."""
        return loss * self._scale if self._is_scaled else loss

    def step(self, learning_rate: float, max_norm: float) -> Tensor:
        """Clip, update, clear the gradients; see `Strategy.step`."""
        norm = self._norm() / self._scale
        clip = (norm / max_norm).clamp(min=1) if max_norm > 0 else torch.ones_like(norm)
        is_finite = norm.isfinite()
        if isinstance(self._adamw, AdamW8bit):
            self._adamw.step(learning_rate, 1 / clip, is_finite)
        else:
            self._update(self._adamw, learning_rate, clip, (~is_finite).float())
        for parameter in self._trained.values():
            parameter.grad = None
        if self._is_scaled:
            self._rescale((~is_finite).float())
        return norm

    def _update(
        self, adamw: torch.optim.AdamW, learning_rate: float, clip: Tensor, found_inf: Tensor
    ) -> None:
        # The same protocol as torch's GradScaler: the kernel divides by `grad_scale`, and skips the
        # update, including Adam's step count, if `found_inf` is 1.
        if clip.dtype == torch.float64:  # the kernel's divisor has only fp32
            for grad in self._grads():
                grad.div_(clip)
            clip = torch.ones_like(clip)
        divisor = (self._scale * clip).float()
        adamw.grad_scale = divisor.to(self._parameter_device)  # type: ignore[attr-defined]
        adamw.found_inf = found_inf.to(self._parameter_device)  # type: ignore[attr-defined]
        for group in adamw.param_groups:
            group["lr"] = learning_rate
        adamw.step()

    def state(self) -> dict[str, Any]:
        """Return live tensors in the format of `Strategy.state`; `scaler` only with fp16."""
        moments = {
            f"{name}.{key}": value
            for name, parameter in self._trained.items()
            for key, value in self._adamw.state[parameter].items()
        }
        model = {name: parameter.detach() for name, parameter in self._trained.items()}
        state = {"model": model, "optimizer": moments}
        if self._is_scaled:
            state["scaler"] = {"scale": self._scale, "good_steps": self._good_steps}
        return state

    def _norm(self) -> Tensor:
        """Return the norm over all gradients of all ranks, before unscaling."""
        norm = _total_norm(self._grads()).to(self._device)
        if self._shards is None:
            return norm
        squared = norm.square()
        dist.all_reduce(squared, group=self._shards)
        return squared.sqrt()

    def _grads(self) -> list[Tensor]:
        """Return this rank's part of every gradient."""
        grads = [p.grad for p in self._trained.values() if p.grad is not None]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]

    def _rescale(self, found_inf: Tensor) -> None:
        """Halve the loss scale after an overflow, double it after many steps without one."""
        self._good_steps.add_(1).mul_(1 - found_inf)
        grown = (self._good_steps == GROWTH_INTERVAL).float()
        self._scale.mul_(1 + grown - found_inf / 2)
        self._good_steps.mul_(1 - grown)


class NativeStrategy:
    """Base class of torch's own strategies: the loss module, and this optimizer."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self._config = config
        self._world = world
        self._module: CausalLoss
        self._optimizer: NativeOptimizer

    def backward(self, loss_sum: Tensor, *, scale: float) -> None:
        """Run the backward pass of the last `forward`."""
        self._optimizer.scaled(loss_sum * scale).backward()

    def step(self, learning_rate: float, max_norm: float) -> Tensor:
        """Clip and update; if a rank's gradients are not finite, the norm is not finite, either."""
        return self._optimizer.step(learning_rate, max_norm)

    def state(self) -> dict[str, Any]:
        """Return the live tensors of this rank, `DTensor`s if they are sharded."""
        return self._optimizer.state()

    @property
    def model(self) -> nn.Module:
        """The unwrapped transformers or peft model, whose parameters may be sharded."""
        return self._module.model


def make_adamw(trained: Mapping[str, nn.Parameter], training: TrainingConfig) -> torch.optim.AdamW:
    """Create AdamW (arXiv:1711.05101) without state; vectors and biases have no weight decay."""
    decayed = {name for name, parameter in trained.items() if _is_decayed(name, parameter)}
    groups = [
        {
            "params": [parameter for name, parameter in trained.items() if name in decayed],
            "weight_decay": training.weight_decay,
        },
        {
            "params": [parameter for name, parameter in trained.items() if name not in decayed],
            "weight_decay": 0.0,
        },
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=training.learning_rate, fused=True
    )


def make_adamw8bit(
    trained: Mapping[str, nn.Parameter], training: TrainingConfig, warn: Callable[[str], None]
) -> AdamW8bit:
    """Create AdamW with 8-bit moments and the same weight decay as `make_adamw`."""
    return AdamW8bit(
        {p: training.weight_decay * _is_decayed(name, p) for name, p in trained.items()},
        {p: name for name, p in trained.items()},
        seed=training.seed,
        compiled=training.compile,
        warn=warn,
    )


def _total_norm(grads: list[Tensor]) -> Tensor:
    """Return the norm over all gradients, accumulated in at least fp32."""
    if not any(grad.dtype == torch.bfloat16 for grad in grads):
        return nn.utils.get_total_norm(grads)
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a weight matrix.

    Stacked biases of experts are two-dimensional, too, so the name decides.
    """
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3's partitions have no shape
    return len(shape) >= 2 and not name.endswith("bias")


def fresh_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return the state that AdamW creates for `parameter` at the first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _expect_dtype(trained: dict[str, nn.Parameter], training: TrainingConfig) -> None:
    setting = f"spec.training.precision {training.precision}"
    expected = torch.float64 if training.precision == "fp64" else torch.float32
    if training.optimizer == "adamw8bit":  # stochastic rounding preserves small updates
        setting, expected = "spec.training.optimizer adamw8bit", torch.bfloat16
    for name, parameter in trained.items():
        if parameter.dtype != expected:
            raise ConfigError(
                f"{setting}: the trained parameter {name} is {parameter.dtype}, not {expected}; "
                "it would lose small updates, or waste memory"
            )

"""Give a loaded model the attention and the kernels that were asked for.

Called by `rank` once adapters are attached, before a strategy makes it parallel. What would have no
effect on this device or model is refused with a sentence.
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.kernels import Card, choose_attention
from finetune_trainer.model.layers import decoder_layers
from finetune_trainer.model.loss import CausalLoss, base_of, loss_inputs

if TYPE_CHECKING:
    from finetune_trainer.data.batch import MicroBatch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_FLOAT8_TOLERANCE = 0.01  # share of the bf16 loss


def prepare_model(
    model: nn.Module,
    config: TrainConfig,
    device: torch.device,
    first_batch: Callable[[], "MicroBatch"],
    warn: Callable[[str], None] = warnings.warn,
) -> CausalLoss:
    """Change an unsharded transformers or peft model, and return the module that strategies wrap.

    `first_batch` makes a batch, the same one on every rank, on which float8 shows what it does to
    the loss. `warn` is told what is used in place of a kernel that the card cannot run.

    Raises:
        ConfigError: an option cannot work with this model or on this device.
    """
    base, training = base_of(model), config.training
    if training.liger:
        _use_liger(base, device)
    choose_attention(
        base,
        Card.of(device),
        _DTYPES.get(training.precision, torch.float32),
        asked=training.attention,
        compiles=training.compile,
        warn=warn,
    )
    if training.precision in ("bf16", "fp16"):
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                # peft widens inputs to fp32, only for autocast to narrow them again.
                module.cast_input_dtype_enabled = False  # type: ignore[assignment]
    module = CausalLoss(model)
    if training.float8:
        if config.method.type != "full":
            raise ConfigError(
                f"spec.training.float8 needs spec.method.type full, not {config.method.type}; set "
                "it to false"
            )
        use_float8(module, loss_inputs(first_batch(), device), device)
    return module


def _use_liger(base: Any, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError("spec.training.liger needs a GPU; set it to false")
    if find_spec("liger_kernel") is None:
        raise ConfigError(
            "spec.training.liger needs the package liger-kernel; install finetune-operator[gpu] or "
            "set it to false"
        )
    liger = import_module("liger_kernel.transformers.monkey_patch")
    if base.config.model_type not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"spec.training.liger has no effect on a model of type {base.config.model_type}; set "
            "it to false"
        )
    # The loss is ours: liger's would take the place of the model's forward.
    liger._apply_liger_kernel_to_instance(
        base, cross_entropy=False, fused_linear_cross_entropy=False
    )


def use_float8(
    module: CausalLoss, inputs: dict[str, Tensor], device: torch.device, *, emulate: bool = False
) -> None:
    """Multiply the decoder layers' matrices in float8, if the loss of one batch stays the same.

    Every rank must be given the same batch, and the model whole. With `emulate` numbers are rounded
    as float8 does, but multiplied as before, for devices without it.

    Raises:
        ConfigError: the device has no float8, or the loss is another one by more than 1 %.
    """
    has_float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if not (has_float8 or emulate):
        raise ConfigError("spec.training.float8 needs a GPU of Ada or Hopper; set it to false")
    if find_spec("torchao") is None:
        raise ConfigError("spec.training.float8 needs the package torchao; install it")
    torchao, base = import_module("torchao.float8"), base_of(module.model)
    layers = decoder_layers(base)
    if not layers:
        raise ConfigError(
            f"spec.training.float8 cannot find the decoder layers of {type(base).__name__}; set it "
            "to false"
        )
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        before = module(**inputs)
        for layer in layers:
            torchao.convert_to_float8_training(
                layer, config=torchao.Float8LinearConfig(emulate=emulate)
            )
        after = module(**inputs)
    off = ((after - before).abs() / before.abs().clamp(min=1e-6)).item()
    if not off <= _FLOAT8_TOLERANCE:
        raise ConfigError(
            f"spec.training.float8 changes the first batch's loss by {off:.1%}, more than "
            f"{_FLOAT8_TOLERANCE:.0%}; set it to false"
        )

"""Set the requested attention and kernels of a loaded model.

Called by `rank` once adapters are attached, before a strategy makes the model parallel. An option
without effect on this device or model is refused.
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.float8 import use_float8
from finetune_trainer.model.kernels import Card, choose_attention
from finetune_trainer.model.loss import CausalLoss, base_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def prepare_model(
    model: nn.Module,
    config: TrainConfig,
    device: torch.device,
    warn: Callable[[str], None] = warnings.warn,
) -> CausalLoss:
    """Prepare an unsharded transformers or peft model, and return the module that strategies wrap.

    `warn` gets a message if the GPU cannot run the default kernel.

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
                # peft casts inputs to fp32, only for autocast to cast them back.
                module.cast_input_dtype_enabled = False  # type: ignore[assignment]
    module = CausalLoss(model, fuse=training.fused_head)
    if training.float8:
        if config.method.type != "full":
            raise ConfigError(
                f"spec.training.float8 needs spec.method.type full, not {config.method.type}; set "
                "it to false"
            )
        use_float8(module, device)
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
    # Liger's loss would replace the model's forward; the loss is computed by `CausalLoss`.
    liger._apply_liger_kernel_to_instance(
        base, cross_entropy=False, fused_linear_cross_entropy=False
    )

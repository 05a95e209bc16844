"""Keep the frozen base in 4 or 8 bits (QLoRA, arXiv:2305.14314); the only file that knows how.

`load` asks for the configuration and settles the loaded layers; `export.merge` asks for a layer's
weight in full. Head and embeddings are not quantised.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def quantization_config(config: TrainConfig, dtype: "torch.dtype") -> Any:
    """Return what `from_pretrained` takes as `quantization_config`, or None for a plain base.

    `dtype` is that of the arithmetic, and of what is not quantised.

    Raises:
        ConfigError: bitsandbytes is missing, or cannot serve this precision or strategy.
    """
    kind, strategy = config.method.quantization, config.strategy.type
    if kind == "none":
        return None
    import torch

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"spec.method.quantization {kind} needs bitsandbytes, which is not installed; "
            "pip install finetune-operator[qlora]"
        )
    if dtype == torch.float64:
        raise ConfigError(
            f"spec.training.precision fp64 has no effect with spec.method.quantization {kind}, "
            "which computes in 32 bits at most; use fp32 or bf16"
        )
    if kind == "int8" and strategy == "fsdp":
        raise ConfigError(
            "spec.method.quantization int8 cannot be sharded by spec.strategy.type fsdp; use "
            "quantization nf4, or strategy ddp"
        )
    if kind == "int8" and config.method.lora is not None and config.method.lora.dora:
        raise ConfigError(
            "spec.method.lora.dora is not possible with spec.method.quantization int8, whose "
            "layers lose their scales when they are widened; use quantization nf4, or dora false"
        )
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # FSDP leaves integers unsharded.
        bnb_4bit_quant_storage=dtype if strategy == "fsdp" else torch.uint8,
    )


def settle(model: "nn.Module") -> None:
    """Keep 4-bit layers on the CPU from repacking themselves in evaluation.

    On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks the weights of a layer that is evaluated,
    rounds their scales, and computes with them ever after, training included, without a gradient.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def full_weight(module: "nn.Module", name: str) -> "Tensor":
    """Return a parameter of one module as the forward pass uses it: dequantised, if need be."""
    import torch

    parameter: Tensor = getattr(module, name).detach()
    whole: Tensor
    state = getattr(module, "quant_state", None)  # FSDP leaves it at the module alone
    if name == "weight" and state is not None:
        from bitsandbytes.functional import dequantize_4bit

        whole = dequantize_4bit(parameter, state)
        return whole
    if parameter.dtype == torch.int8:
        from bitsandbytes.functional import int8_vectorwise_dequant

        layer: Any = module
        owner = layer.weight if layer.state.SCB is None else layer.state  # since its first forward
        whole = int8_vectorwise_dequant(parameter, owner.SCB)
        return whole
    return parameter

"""Quantise the frozen base to 4 or 8 bits (QLoRA, arXiv:2305.14314).

`load` uses the configuration and prepares the loaded layers. FSDP quantises weights while it shards
them. The module `answers` moves a model with quantised weights, and `export.merge` dequantises the
weight of a layer. Head and embeddings are not quantised. No other module knows the format.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from finetune_trainer.world import World

# Attributes of a weight to be quantised.
_SETTINGS = ("blocksize", "compress_statistics", "quant_type", "quant_storage")


def quantization_config(config: TrainConfig, dtype: "torch.dtype") -> Any:
    """Return the `quantization_config` of `from_pretrained`; None for a plain base.

    `dtype` is the compute dtype, and the dtype of parameters that are not quantised.

    Raises:
        ConfigError: bitsandbytes is missing, or does not support this precision or strategy.
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
            "layers lose their scales when dequantised; use quantization nf4, or dora false"
        )
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        # FSDP's CUDA kernel rewrites NaNs when it copies 16-bit floats. It copies bytes unchanged.
        bnb_4bit_quant_storage=torch.uint8,
    )


def unquantized_warning(model: "PreTrainedModel") -> str | None:
    """Return a warning if matrices beside embeddings and head are not quantised.

    bitsandbytes quantises linear layers only. Many families stack the weights of their experts in
    parameters of their own, which are most of the model; DBRX stacks them in two dimensions.
    """
    from torch import nn

    plain = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
    wide = {
        f"{name}.{leaf}": parameter.numel() * parameter.element_size()
        for name, module in model.named_modules()
        if not isinstance(module, plain)
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 2 or (parameter.ndim == 2 and "experts" in name)
    }
    if not wide:
        return None
    first, *more = wide
    dtype = str(model.get_parameter(first).dtype).removeprefix("torch.")
    return (
        f"{sum(wide.values()) / 2**30:.3g} GiB of the model stay {dtype}, because bitsandbytes "
        f"quantises linear layers only, and no stacked experts ({first} and {len(more)} more); the "
        "memory check counts them"
    )


def use_pure_products(model: "nn.Module") -> None:
    """Replace the forward pass of 4-bit layers by the product alone, which changes no attribute.

    The forward pass of bitsandbytes 0.50 wraps a weight that FSDP gathered, which breaks a compiled
    graph. On a CPU with AVX512-BF16 it repacks the weights of a layer in evaluation, rounds their
    scales, and uses them from then on, also in training, without a gradient.
    """
    if sys.modules.get("bitsandbytes") is None:
        return  # so no layer has 4 bits
    bnb: Any = importlib.import_module("bitsandbytes")

    class Linear4bit(bnb.nn.Linear4bit):  # type: ignore[misc]
        """Reads the scales from the layer, because the weight that FSDP gathers has none."""

        def forward(self, x: "Tensor") -> "Tensor":
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            state, given = self.quant_state, x.to(self.compute_dtype)
            product: Tensor = bnb.matmul_4bit(given, self.weight, bias=bias, quant_state=state)
            return product.to(x.dtype)

    for module in model.modules():
        if type(module) is bnb.nn.Linear4bit:
            module.__class__ = Linear4bit


def insert_unquantized_4bit_layers(model: "PreTrainedModel", quantization: Any) -> None:
    """Insert 4-bit layers with plain weights, which are quantised when moved to a device."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import AutoHfQuantizer

    plain = dict(model.named_modules())
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map=None)
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear4bit):
            continue
        weight = plain[name].weight.data
        settings = {key: getattr(layer.weight, key) for key in _SETTINGS}
        layer.weight = Params4bit(
            weight.T if isinstance(plain[name], Conv1D) else weight,
            requires_grad=False,
            module=layer,
            **settings,
        )
        layer.bias = plain[name].bias
    quantizer.postprocess_model(model)


def stored_as(parameter: "Tensor") -> "tuple[torch.Size, torch.dtype]":
    """Return shape and dtype of a parameter after its move to a device, which may quantise it."""
    import torch

    if getattr(parameter, "bnb_quantized", True):
        return parameter.shape, parameter.dtype
    storage: torch.dtype = parameter.quant_storage  # type: ignore[attr-defined]
    numbers = (parameter.numel() + 1) // (2 * storage.itemsize)  # two to a byte
    return torch.Size((numbers, 1)), storage


def broadcast_quant_states(
    model: "nn.Module", skeleton: "nn.Module | None", world: "World"
) -> None:
    """Broadcast rank 0's scales of all 4-bit layers, 1/32 of their weights; a collective.

    Scales are attributes of the layer, so FSDP does not shard them. The layers of `skeleton` get
    theirs in host memory.
    """
    import torch

    twins = dict(skeleton.named_modules()) if skeleton is not None else {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "quant_state"):
            continue
        from bitsandbytes.functional import QuantState

        own = layer.quant_state.as_dict(packed=True) if world.is_main else {}
        scales = _broadcast({key: part.cpu() for key, part in own.items()}, world)
        layer.quant_state = QuantState.from_dict(dict(scales), device=world.device)
        if name in twins:
            twins[name].quant_state = QuantState.from_dict(scales, device=torch.device("cpu"))


def _broadcast(tensors: "dict[str, Tensor]", world: "World") -> "dict[str, Tensor]":
    """Broadcast rank 0's tensors in host memory as safetensors, without pickle; a collective."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load, save

    if world.control_group is None:
        return tensors
    data = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, src=0, group=world.control_group)
    if not world.is_main:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=world.control_group)
    received: dict[str, Tensor] = load(data.numpy().tobytes())
    return received


def move(model: "nn.Module", device: "torch.device") -> None:
    """Move a model, including the scales of 4-bit layers, which are not buffers."""
    model.to(device)
    for layer in model.modules():
        if (scales := getattr(layer, "quant_state", None)) is not None:
            scales.to(device)


def full_weight(module: "nn.Module", name: str) -> "Tensor":
    """Return a parameter of a module as the forward pass uses it, dequantised if necessary."""
    import torch

    parameter: Tensor = getattr(module, name).detach()
    whole: Tensor
    state = getattr(module, "quant_state", None)  # FSDP leaves it on the module only
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

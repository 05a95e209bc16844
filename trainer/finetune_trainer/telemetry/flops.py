"""Model FLOPs of training, and the peak FLOPs of devices.

Model FLOPs are the FLOPs that the method needs (arXiv:2204.02311, appendix B): padding and
recomputed activations are not counted, a head counts only for label tokens if it is evaluated only
there, and a token attends only within its own document, even if several documents share a row. For
each token, a product with n weights takes

    2 n   forward
    2 n   backward, for the gradient of its input
    2 n   backward, for the gradient of the weights, if they are trained

so frozen weights take 4 n, trained weights 6 n, and adapters 6 n for their own n. Attention of one
layer takes 12 T * H * Q * W for a document of T tokens, with H heads of Q numbers each, where W is
T or the size of the sliding window.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

    IntArray = npt.NDArray[np.integer[Any]]

# Dense peaks without sparsity of whole devices, from NVIDIA's data sheets. Names are the driver's;
# a partition of a device (MIG, vGPU) has another name and no known peak.
_PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    (r"NVIDIA B200", {"bf16": 2250e12, "fp16": 2250e12}),
    (r"NVIDIA H200|NVIDIA H100 80GB HBM3", {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 67e12}),
    (r"NVIDIA H200 NVL|NVIDIA H100 NVL", {"bf16": 835.5e12, "fp16": 835.5e12, "fp32": 60e12}),
    (r"NVIDIA H100 PCIe", {"bf16": 756e12, "fp16": 756e12, "fp32": 51e12}),
    (
        r"(NVIDIA )?A100-(SXM4|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe",
        {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    ),
    (r"NVIDIA L40S", {"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12}),
    (r"NVIDIA L4", {"bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12}),
    (r"NVIDIA A10", {"bf16": 125e12, "fp16": 125e12, "fp32": 31.2e12}),
    (r"(NVIDIA |Tesla )V100-SXM[23]-(16|32)GB", {"fp16": 125e12, "fp32": 15.7e12}),
    (r"(NVIDIA |Tesla )V100-PCIE-(16|32)GB", {"fp16": 112e12, "fp32": 14e12}),
    (r"(NVIDIA |Tesla )T4", {"fp16": 65e12, "fp32": 8.1e12}),
)
_FULL_ATTENTION, _WINDOW = "full_attention", "sliding_attention"
# Layer types whose attention is known; "mlp" and "moe" have none.
_KNOWN_LAYERS = {_FULL_ATTENTION, _WINDOW, "attention", "mlp", "moe"}
# Families that use some matrices several times per token, or not at all in training.
_UNSUPPORTED = frozenset(
    {
        "dbrx",
        "diffllama",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_text",
        "git",
        "hrm_text",
        "jetmoe",
        "longcat_flash",
        "minimax_m3_vl_text",
        "modernbert-decoder",
        "phi4_multimodal",
    }
)
# Field names for the experts per token and for the total number of experts.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one token, forward and backward.

    Attributes:
        per_token: Of all matrices except the head's.
        per_label_token: Of the head.
        attention: FLOPs of a token per attended token, summed over all layers with the same
            window; the key is the window's size, None for the whole document.
    """

    per_token: float
    per_label_token: float
    attention: Mapping[int | None, float]

    def of(self, lengths: "IntArray", label_counts: "IntArray") -> "npt.NDArray[np.float64]":
        """Return the FLOPs (N,) of documents with these numbers of tokens and labels (N,)."""
        import numpy as np

        tokens = lengths.astype(np.float64)
        total = self.per_token * tokens + self.per_label_token * label_counts
        for window, flops in self.attention.items():
            total += flops * tokens * (tokens if window is None else np.minimum(tokens, window))
        return total


def model_flops(model: "nn.Module") -> ModelFlops | None:
    """Return the FLOPs per token of a transformers or peft model in training.

    Sharded and quantised weights count by their shape, so this can be called at any time.

    Returns:
        None if the model computes with operations other than matrix products and attention.
    """
    unwrap = getattr(model, "get_base_model", None)
    base: Any = model if unwrap is None else unwrap()
    if base.config.model_type in _UNSUPPORTED:
        return None
    config = base.config.get_text_config()
    attention, share = _attention(config), _share_of_experts(config)
    head = {id(module) for module in base.get_output_embeddings().modules()}
    used = head | {id(module) for module in base.get_decoder().modules()}
    products = [one for one in _products(model) if id(one.module) in used]
    if attention is None or (share is None and any(one.is_expert for one in products)):
        return None
    per_token, per_label_token = 0.0, 0.0
    for one in products:
        flops = (6 if one.is_trained else 4) * one.size * ((share or 1) if one.is_expert else 1)
        if id(one.module) in head:
            per_label_token += flops
        else:
            per_token += flops
    return ModelFlops(per_token, per_label_token, attention)


def peak_flops(device: str, precision: str, *, is_float8: bool = False) -> float | None:
    """Return the peak FLOPs per second of a device at a precision; None if not known.

    Args:
        device: Its name as reported by the driver.
        precision: `bf16`, `fp16`, `fp32` or `fp64`.
        is_float8: Whether part of the work runs in float8, so that there is no single peak.
    """
    if is_float8:
        return None
    found = (peaks for names, peaks in _PEAKS if re.fullmatch(names, device))
    return next(found, {}).get(precision)


@dataclass(frozen=True)
class _Product:
    """A product with `size` weights."""

    module: "nn.Module"
    size: int
    is_trained: bool
    is_expert: bool


def _products(model: "nn.Module") -> Iterator[_Product]:
    """Yield the products of each token: linear layers, routers, experts stacked in a parameter."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        is_expert = "experts" in name.split(".")
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.Linear):
            size = module.in_features * module.out_features
            yield _Product(module, size, module.weight.requires_grad, is_expert)
        elif isinstance(module, Conv1D):
            yield _Product(module, module.nx * module.nf, module.weight.requires_grad, is_expert)
        elif "Router" in type(module).__name__:
            for one in (one for one in own if one.ndim == 2):
                yield _Product(module, one.numel(), one.requires_grad, is_expert=False)
        elif is_expert:
            for one in (one for one in own if one.ndim == 3):
                yield _Product(module, one.numel(), one.requires_grad, is_expert=True)


def _share_of_experts(config: Any) -> float | None:
    chosen = _first(config, _EXPERTS_PER_TOKEN)
    experts = _first(config, _EXPERTS)
    return chosen / experts if chosen and experts else None


def _first(config: Any, names: Sequence[str]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _attention(config: Any) -> dict[int | None, float] | None:
    """Return `ModelFlops.attention`; None if a layer has an unknown type."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        is_window = bool(getattr(config, "sliding_window", None)) and getattr(
            config, "use_sliding_window", True
        )
        kinds = [_WINDOW if is_window else _FULL_ATTENTION] * config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", None)
    if not set(kinds) <= _KNOWN_LAYERS or not isinstance(heads, int):
        return None
    queries = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_layer = 6.0 * heads * (_query_width(config) or queries) + 6.0 * heads * (
        getattr(config, "v_head_dim", None) or queries
    )
    attention: dict[int | None, float] = {}
    for kind in kinds:
        if kind in (_FULL_ATTENTION, _WINDOW, "attention"):
            window = config.sliding_window if kind == _WINDOW else None
            attention[window] = attention.get(window, 0.0) + per_layer
    return attention


def _query_width(config: Any) -> int | None:
    """Return the query width of latent attention, whose queries have a part without positions."""
    nope, rope = (getattr(config, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
    return nope + rope if nope and rope else None

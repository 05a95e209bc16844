"""Attention inside documents only: no mask of a pack's length squared is built or read.

`loss` hands the documents' bounds to the model in place of a mask: transformers passes a mask of
four dimensions through to each layer as it is, and a layer with another kind of attention refuses
one of integers. What is done to a whole batch is done once there, nothing in each layer.
"""

import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NAME = "documents"


def isolate_documents(base: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Register and choose the attention for a transformers model, where it is known to be right.

    Everywhere else the model keeps its own attention with the mask that it makes, which is slower;
    whether that mask keeps documents apart is for `isolation` to find out.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for answers, which are made with a cache
    chosen = _is_plain(base) and (device.type == "cpu" or _has_kernel(base, dtype))
    if chosen:
        base.set_attn_implementation(NAME)
    return chosen


def is_isolating(base: Any) -> bool:
    """Say whether the model was given this attention."""
    return bool(base.config._attn_implementation == NAME)


def bounds_as_mask(bounds: Tensor) -> Tensor:
    """Return the documents' bounds (L, N + 1) in the form in which models pass them on."""
    return bounds[None, None]


def _is_plain(base: Any) -> bool:
    """Say whether all layers attend causally, fully or in a window that they name."""
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    source = inspect.getsource(sys.modules[type(base).__module__])
    tells_window = re.search(r"sliding_window=(self|getattr)", source) is not None
    return (
        base._supports_attention_backend
        and base._supports_sdpa
        and base._can_set_attn_implementation()
        and kinds <= {"sliding_attention"}
        and not getattr(config, "attention_chunk_size", None)
        and (tells_window or not getattr(config, "sliding_window", None))
    )


def _has_kernel(base: Any, dtype: torch.dtype) -> bool:
    """Say whether the GPU's kernel can serve: it knows no dropout and no wide numbers."""
    config = base.config.get_text_config()
    rates = (getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))
    return dtype in (torch.bfloat16, torch.float16) and not any(rates)


def _attend(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, G, T, D), G divides H
    value: Tensor,  # (B, G, T, D)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend inside the documents that `attention_mask` bounds; any other mask is SDPA's."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return output, None
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name} cannot keep documents apart")
    batch, _, length, _ = query.shape
    # Positions may have widened query and key alone, which kernels refuse. On a CPU torch's bf16
    # attention takes three times as long as its fp32 one (documents of 60 tokens, Zen 4).
    on_cpu = query.device.type == "cpu"
    dtype = torch.promote_types(value.dtype, torch.float32) if on_cpu else value.dtype
    rows = [tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    bounds, window = attention_mask[0, 0, 0], kwargs.get("sliding_window") or 0
    if on_cpu:
        with torch.autocast("cpu", enabled=False):
            output = _attend_each(rows, bounds, window, dropout, scaling)
    else:
        output = _attend_at_once(rows, bounds, attention_mask.shape[2], window, scaling)
    return output.to(value.dtype).view(batch, length, *output.shape[1:]), None


def _attend_at_once(
    rows: list[Tensor], bounds: Tensor, length: int, window: int, scaling: float | None
) -> Tensor:
    """Attend in all documents in one kernel; the longest has `length` tokens."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = rows
    output = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        length,
        length,
        scale=scaling,
        window_size=(window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(output, Tensor), "nothing else was asked for"
    return output


def _attend_each(
    rows: list[Tensor], bounds: Tensor, window: int, dropout: float, scaling: float | None
) -> Tensor:
    """Attend document by document: `rows` are query, key and value (B * T, heads, D)."""
    lengths, outputs = bounds.diff().tolist(), []
    for document in zip(*(torch.split(tensor, lengths) for tensor in rows), strict=True):
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in document)
        length = query.shape[2]
        band = None
        if 0 < window < length:
            band = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
        output = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=band,
            dropout_p=dropout,
            is_causal=band is None,
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)

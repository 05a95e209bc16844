"""Attend within documents, without a mask quadratic in the length of a pack.

`loss` passes the bounds of the documents to the model in place of a mask. transformers passes a
four-dimensional mask unchanged to each layer, and a layer with another kind of attention rejects an
integer mask. The bounds are prepared once per batch in `loss`, not in each layer.
"""

import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from finetune_trainer.model import flex

NAME = "documents"
_WIDEST_HEAD = 256  # limit of flash attention

# Missing in torch 2.11.
_VARLEN_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def use_documents(base: Any) -> None:
    """Register the attention and select it, for a transformers model without a `fault`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for generation, which uses a cache
    base.set_attn_implementation(NAME)


def is_isolating(base: Any) -> bool:
    """Whether the model has an attention that takes the bounds of documents."""
    return base.config._attn_implementation in (NAME, flex.NAME)


def as_mask(base: Any, bounds: Tensor, position_ids: Tensor) -> Tensor:
    """Return the bounds (L, N + 1) of documents in the form that the model's attention reads."""
    if base.config._attn_implementation == flex.NAME:
        return flex.documents_as_mask(position_ids)
    return bounds_as_mask(bounds)


def bounds_as_mask(bounds: Tensor) -> Tensor:
    """Return the bounds (L, N + 1) of documents as the mask that models pass on."""
    return bounds[None, None]


def dynamic_dimensions(mask: Tensor) -> tuple[int, ...]:
    """Return the dimensions of such a mask that differ from pack to pack."""
    is_bounds = mask.dtype == torch.int32 and mask.ndim == 4 and mask.shape[2] > 1
    return (2, 3) if is_bounds else ()


def fault(base: Any, *, on_gpu: bool, compiles: bool) -> str | None:
    """Return why this attention may be wrong for a model; None if no reason is found.

    Such a model may use its own attention with its own mask, which is slower. `isolation` measures
    whether that mask separates documents.
    """
    config = base.config.get_text_config()
    if not (base._supports_attention_backend and base._can_set_attn_implementation()):
        return "transformers does not support another attention for this family"
    if not base._supports_sdpa:
        return "it changes the scores before the softmax, such as by a cap"
    width = max(head_widths(base), default=0)
    if on_gpu and width > _WIDEST_HEAD:
        return f"its heads are {width} wide, flash attention's at most {_WIDEST_HEAD}"
    knows_dropout = not (on_gpu or compiles)
    return shape_fault(base) or (None if knows_dropout else dropout_fault(config))


def head_widths(base: Any) -> list[int]:
    """Return the widths of the heads that modules declare; they may differ by layer."""
    widths = (getattr(part, "head_dim", None) for part in base.modules())
    return [width for width in widths if isinstance(width, int)]


def shape_fault(base: Any) -> str | None:
    """Return which layers attend neither to all earlier tokens nor within a declared window."""
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others := kinds - {"sliding_attention"}:
        return f"it has layers of another kind ({', '.join(sorted(others))})"
    if getattr(config, "attention_chunk_size", None):
        return "its layers attend in chunks"
    source = inspect.getsource(sys.modules[type(base).__module__])
    passes_window = re.search(r"sliding_window=(self|getattr)", source) is not None
    if not passes_window and getattr(config, "sliding_window", None):
        return "its layers do not pass on the width of their window"
    if re.search(r"\b(s_aux|position_bias)=", source):
        return "its layers add terms of their own to the scores"
    return None


def dropout_fault(config: Any) -> str | None:
    """Return a fault if the model has dropout in attention, which kernels do not support."""
    rates = (getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop"))
    return (
        "it has dropout in attention (spec.training.dropout 0 removes it)" if any(rates) else None
    )


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
    """Attend within the documents that `attention_mask` bounds; other masks go to SDPA."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return output, None
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name} cannot separate documents")
    batch, _, length, _ = query.shape
    # Rotary positions may have promoted query and key only, which kernels reject. On a CPU torch's
    # bf16 attention takes three times as long as fp32 (documents of 60 tokens, Zen 4).
    each = query.device.type == "cpu" and not torch.compiler.is_compiling()
    dtype = torch.promote_types(value.dtype, torch.float32) if each else value.dtype
    rows = [tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    bounds, window = attention_mask[0, 0, 0], kwargs.get("sliding_window") or 0
    if each:
        with torch.autocast("cpu", enabled=False):
            output = _attend_each(rows, bounds, window, dropout, scaling)
    else:
        output = _attend_at_once(rows, bounds, attention_mask.shape[2], window, scaling)
    return output.to(value.dtype).view(batch, length, *output.shape[1:]), None


def _attend_at_once(
    rows: list[Tensor], bounds: Tensor, length: int, window: int, scaling: float | None
) -> Tensor:
    """Attend within all documents in one kernel; the longest has `length` tokens."""
    query, key, value = rows
    options: dict[str, Any] = {}
    if _VARLEN_GROUPS_HEADS:
        options["enable_gqa"] = True
    else:
        shared = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
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
        **options,
    )
    assert isinstance(output, Tensor), "no other output was requested"
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

"""Attend with torch's flex attention: causal, within documents and a window, with capped scores.

It is used for models that the kernel of `attention` does not support, such as Gemma 2. A block mask
selects the blocks of scores to compute. It is built from document numbers by a few operations on
tiny tensors, never quadratic in the length of a pack, and without a host-device synchronisation.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.compiler import compile_backward_at_once, reason_of

NAME = "documents_flex"
_BLOCK = 128  # positions; the block size of flex attention


def documents_as_mask(position_ids: Tensor) -> Tensor:
    """Return the document number of each position (B, 1, 1, T), in the shape of a mask."""
    return (position_ids == 0).cumsum(1).int()[:, None, None]


def attend(
    module: nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, G, T, D), G divides H
    value: Tensor,  # (B, G, T, D)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within the documents that `attention_mask` numbers; other masks are added.

    Returns:
        The output (B, T, H, D).
    """
    softcap = kwargs.get("softcap")
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary positions may promote
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return _attend_densely(query, key, value, attention_mask, scaling, softcap), None
    mask = block_mask(attention_mask[:, 0, 0], kwargs.get("sliding_window") or 0)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * float(softcap)

    # Within a compiled layer the kernel is part of the graph.
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _uncompiled_call
    output = kernel(
        query,
        key,
        value,
        score_mod=capped if softcap else None,
        block_mask=mask,
        scale=scaling,
        enable_gqa=True,
    )
    assert isinstance(output, Tensor), "no other output was requested"
    return output.transpose(1, 2).contiguous(), None


def block_mask(documents: Tensor, window: int) -> BlockMask:
    """Return the partial and the full blocks of the scores.

    Args:
        documents: (B, T) document numbers, non-decreasing along a row.
        window: Number of positions that a token sees, including itself; 0 for all earlier ones.
    """
    length = documents.shape[1]

    def allowed(row: Tensor, head: Tensor, asking: Tensor, seen: Tensor) -> Tensor:
        is_seen = (seen <= asking) & (documents[row, seen] == documents[row, asking])
        return is_seen & (asking - seen < window) if window else is_seen

    # Padding is another document, so a last block that is not full is not treated as full.
    beyond = torch.iinfo(documents.dtype).max
    blocks = functional.pad(documents, (0, -length % _BLOCK), value=beyond)
    blocks = blocks.unflatten(1, (-1, _BLOCK))
    first, last = blocks[..., 0], blocks[..., -1]
    places = torch.arange(blocks.shape[1], device=documents.device)
    apart = _BLOCK * (
        places[:, None] - places
    )  # positions between the block of queries and the block of keys
    exists = (apart >= 0) & (last[:, None, :] >= first[:, :, None])
    is_whole = (apart > 0) & (first[:, None, :] == last[:, :, None])
    if window:
        exists &= apart - (_BLOCK - 1) < window
        is_whole &= apart + (_BLOCK - 1) < window
    return BlockMask.from_kv_blocks(
        *_in_order(exists & ~is_whole),
        *_in_order(is_whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=allowed,
        seq_lengths=(length, length),
    )


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks per row (B, 1, Q), and all block indices, counted ones first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    places = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[:, None], places[:, None]


def _uncompiled_call(query: Tensor, *given: Any, **options: Any) -> Any:
    from torch._dynamo.exc import TorchDynamoException

    try:
        return _compiled(query.device.type)(query, *given, **options)
    except TorchDynamoException as error:
        raise ConfigError(
            f"spec.training.attention: flex cannot be compiled here ({reason_of(error)}); use model"
        ) from error


@cache
def _compiled(device_type: str) -> Any:
    """Return flex attention for layers that are not compiled.

    Uncompiled, it would materialise all scores, and its gradients under recomputation are NaN
    (torch 2.13). On a CPU the compiler has no backward, so the graph runs uncompiled.
    """
    compile_backward_at_once()
    return torch.compile(
        flex_attention, backend="inductor" if device_type == "cuda" else "aot_eager"
    )


def _attend_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Attend with an additive mask, for generation, which uses a cache."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return (shares.to(value.dtype) @ value).transpose(1, 2).contiguous()

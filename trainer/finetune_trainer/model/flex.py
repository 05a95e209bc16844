"""Attention by torch's flex: causal, inside documents, in a window, with a cap on the scores.

The kernel for models that `attention`'s cannot serve, as Gemma 2. A mask of blocks says which parts
of the scores exist at all; it is made of documents' numbers by a few operations on tiny tensors,
never of a pack's length squared, and nothing waits for the device.
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
_BLOCK = 128  # positions; flex's own


def documents_as_mask(position_ids: Tensor) -> Tensor:
    """Return the number of each position's document (B, 1, 1, T), as models pass masks on."""
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
    """Attend inside the documents that `attention_mask` numbers; any other mask is added.

    Returns:
        The output (B, T, H, D).
    """
    softcap = kwargs.get("softcap")
    query, key = query.to(value.dtype), key.to(value.dtype)  # positions may have widened them
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return _attend_densely(query, key, value, attention_mask, scaling, softcap), None
    mask = block_mask(attention_mask[:, 0, 0], kwargs.get("sliding_window") or 0)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * float(softcap)

    # Inside a compiled layer it is part of the graph.
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _alone
    output = kernel(
        query,
        key,
        value,
        score_mod=capped if softcap else None,
        block_mask=mask,
        scale=scaling,
        enable_gqa=True,
    )
    assert isinstance(output, Tensor), "nothing else was asked for"
    return output.transpose(1, 2).contiguous(), None


def block_mask(documents: Tensor, window: int) -> BlockMask:
    """Return which blocks of the scores exist, and which of them wholly.

    Args:
        documents: (B, T) numbers that never fall along a row.
        window: How many positions a token sees, itself included; 0 is all before it.
    """
    length = documents.shape[1]

    def allowed(row: Tensor, head: Tensor, asking: Tensor, seen: Tensor) -> Tensor:
        is_seen = (seen <= asking) & (documents[row, seen] == documents[row, asking])
        return is_seen & (asking - seen < window) if window else is_seen

    # Beyond the end is another document, which leaves no last block that is not full as if it were.
    beyond = torch.iinfo(documents.dtype).max
    blocks = functional.pad(documents, (0, -length % _BLOCK), value=beyond)
    blocks = blocks.unflatten(1, (-1, _BLOCK))
    first, last = blocks[..., 0], blocks[..., -1]
    places = torch.arange(blocks.shape[1], device=documents.device)
    apart = _BLOCK * (places[:, None] - places)  # positions, of queries' block and keys' block
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
    """Return how many blocks each row of blocks has (B, 1, Q), and their places first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    places = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[:, None], places[:, None]


def _alone(query: Tensor, *given: Any, **options: Any) -> Any:
    from torch._dynamo.exc import TorchDynamoException

    try:
        return _compiled(query.device.type)(query, *given, **options)
    except TorchDynamoException as error:
        raise ConfigError(
            f"spec.training.attention: flex cannot be compiled here ({reason_of(error)}); use model"
        ) from error


@cache
def _compiled(device_type: str) -> Any:
    """Return flex for layers that are not compiled.

    As it is it would make all scores, and under recomputation its gradients are not numbers
    (torch 2.13). The compiler has no backward for a CPU, where the graph is run as it is.
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
    """Attend with a mask to add to the scores: for answers, which are made with a cache."""
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

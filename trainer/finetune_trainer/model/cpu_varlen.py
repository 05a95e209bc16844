"""Register CPU kernels for torch's variable-length attention, which lacks them.

Called by `compile` if layers are compiled for a CPU: the compiler then sees the same operator as on
a GPU, and its graphs depend neither on the number of documents nor on their lengths. Without
compilation `attention` calls torch document by document, which needs no such operator.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor


@cache
def register() -> None:
    """Register the CPU kernels of the operator, once per process."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    query: Tensor,  # (T, H, D)
    key: Tensor,  # (T, G, D), G divides H
    value: Tensor,  # (T, G, D)
    cu_seq_q: Tensor,  # (N + 1,)
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: object,  # arguments for paged caches
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (T, H, D), the softmax's log-denominators (H, T), and an unused state."""
    output = torch.empty_like(query)
    logs = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    for part, rows, band in _documents([query, key, value], cu_seq_q, window_size):
        found, denominators = _attend(rows, band, scale)
        output[part] = found[0].transpose(0, 1)
        logs[:, part] = denominators[0]
    return output, logs, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,  # (T, H, D)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    sources = (query, key, value)
    grads = [torch.empty_like(source) for source in sources]
    for part, rows, band in _documents([query, key, value, grad_out], cu_seq_q, window_size):
        *inputs, slope = rows
        # Recomputed: the dtypes of the stored output and denominators are too small for fp64.
        found, denominators = _attend(inputs, band, scale)
        document_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            slope, *inputs, found, denominators, 0.0, band is None, attn_mask=band, scale=scale
        )
        for grad, one, source in zip(grads, document_grads, sources, strict=True):
            grouped = one[0].transpose(0, 1).unflatten(1, (source.shape[1], -1))
            grad[part] = grouped.sum(2)
    grad_query, grad_key, grad_value = grads
    return grad_query, grad_key, grad_value


def _attend(rows: list[Tensor], band: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    output, denominators = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *rows, 0.0, band is None, attn_mask=band, scale=scale
    )
    return output, denominators


def _documents(
    tensors: list[Tensor], bounds: Tensor, window_size: list[int] | None
) -> Iterator[tuple[slice, list[Tensor], Tensor | None]]:
    """Yield the slice of each document, its part of the tensors as (1, H, T, D), and the window.

    Keys and values are repeated for the heads that share them, and numbers are at least fp32: on a
    CPU torch's bf16 attention takes three times as long.
    """
    heads, dtype = tensors[0].shape[1], torch.promote_types(tensors[0].dtype, torch.float32)
    places = bounds.tolist()
    window = 0 if window_size is None else window_size[0] + 1
    for start, end in pairwise(places):
        rows, band = [], None
        for tensor in tensors:
            row = tensor[start:end].to(dtype).transpose(0, 1)
            rows.append(row.repeat_interleave(heads // row.shape[0], 0)[None])
        if 0 < window < end - start:
            allowed = torch.ones(end - start, end - start, dtype=torch.bool).tril().triu(1 - window)
            band = torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)
        yield slice(start, end), rows, band

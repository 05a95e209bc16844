"""Quantise tensors to 8 bits, with one scale per block (arXiv:2110.02861).

Called by `adamw8bit`, for the moments. A code stands for a share of the block's largest value. The
map of codes is fine near 0 (arXiv:1511.04561): it has seven decades, of which larger ones have more
steps.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

LONGEST_BLOCK = 256
# A scale takes 4 bytes; in shorter blocks it would exceed the savings of the codes.
SHORTEST_BLOCK = 32
# Divisor of a block of zeros.
_LEAST_SCALE = 1e-12
_DECADES = 7


def block_length(shape: torch.Size) -> int | None:
    """Return the block length of a tensor; None if 8 bits would save no memory.

    The length divides the number of elements per index of the first dimension. Each block is
    therefore on one rank, however the first dimension is sharded.
    """
    if len(shape) < 2:
        return None
    row = shape[1:].numel()
    lengths = range(min(LONGEST_BLOCK, row), SHORTEST_BLOCK - 1, -1)
    return next((length for length in lengths if row % length == 0), None)


class Codebook(NamedTuple):
    """The values of the 256 codes, on one device."""

    values: Tensor  # (256,) in rising order, fp32
    boundaries: Tensor  # (255,) midpoints of neighbouring values
    is_signed: bool

    @classmethod
    def on(cls, device: torch.device, *, signed: bool) -> Self:
        """Return the codes on a device; a host sync."""
        values = torch.tensor(value_map(signed=signed), device=device)
        return cls(values, (values[:-1] + values[1:]) / 2, signed)


def encode(values: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Return the nearest uint8 codes (N, B) and the scales (N,) of fp32 values (N, B).

    With unsigned codes, positive values remain positive.
    """
    scales = values.abs().amax(1).clamp(min=_LEAST_SCALE)
    shares = values / scales[:, None]
    codes = torch.bucketize(shares, codebook.boundaries, out_int32=True, right=True)
    if not codebook.is_signed:
        codes = torch.where(values > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, codebook: Codebook) -> Tensor:
    """Return the fp32 values (N, B) of codes (N, B) and scales (N,)."""
    return codebook.values[codes.int()] * scales[:, None]


def value_map(*, signed: bool) -> list[float]:
    """Return the 256 shares of the codes, in rising order.

    Decade k from the top is split into 2^(6-k) steps, twice as many if unsigned; the value of a
    code is the midpoint of its step. The two spare codes are 0 and 1.
    """
    shares = [0.0, 1.0]
    for decade in range(_DECADES):
        steps = 2 ** (decade if signed else decade + 1)
        top = 10.0 ** (decade + 1 - _DECADES)
        middles = [top * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
        shares += middles + ([-share for share in middles] if signed else [])
    return sorted(shares)

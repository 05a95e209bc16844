"""Numbers in 8 bits, each block with a scale of its own (arXiv:2110.02861).

Called by `adamw8bit`, for the moments. A code stands for a share of the block's largest value, by a
map that is fine near 0 (arXiv:1511.04561): seven decades, with more steps the larger they are.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

LONGEST_BLOCK = 256
# A scale takes 4 bytes; in shorter blocks it would outweigh what the codes save.
SHORTEST_BLOCK = 32
# A block of zeros is divided by this.
_LEAST_SCALE = 1e-12
_DECADES = 7


def block_length(shape: torch.Size) -> int | None:
    """Return the length of the blocks of a tensor; None where 8 bits would not pay.

    It divides what one index of the first dimension holds. So no block reaches over two of them,
    and however the first dimension is divided over ranks, each block is on one rank, whole.
    """
    if len(shape) < 2:
        return None
    row = shape[1:].numel()
    lengths = range(min(LONGEST_BLOCK, row), SHORTEST_BLOCK - 1, -1)
    return next((length for length in lengths if row % length == 0), None)


class Codes(NamedTuple):
    """What 256 codes stand for, on one device."""

    values: Tensor  # (256,) in rising order, fp32
    between: Tensor  # (255,) the middle between each two
    is_signed: bool

    @classmethod
    def on(cls, device: torch.device, *, signed: bool) -> Self:
        """Return them; the host waits for the device."""
        values = torch.tensor(value_map(signed=signed), device=device)
        return cls(values, (values[:-1] + values[1:]) / 2, signed)


def encode(values: Tensor, meaning: Codes) -> tuple[Tensor, Tensor]:
    """Return the nearest codes (N, B) in uint8 and the scales (N,) of values (N, B) in fp32.

    Where codes spend none on a sign, what is more than 0 stays so.
    """
    scales = values.abs().amax(1).clamp(min=_LEAST_SCALE)
    shares = values / scales[:, None]
    codes = torch.bucketize(shares, meaning.between, out_int32=True, right=True)
    if not meaning.is_signed:
        codes = torch.where(values > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, meaning: Codes) -> Tensor:
    """Return the values (N, B) in fp32 that codes (N, B) and scales (N,) stand for."""
    return meaning.values[codes.int()] * scales[:, None]


def value_map(*, signed: bool) -> list[float]:
    """Return the 256 shares that codes stand for, in rising order.

    Decade k from the top has 2^(6-k) steps, twice as many where no code is spent on a sign; a step
    stands for its middle. What is left are 0 and 1.
    """
    shares = [0.0, 1.0]
    for decade in range(_DECADES):
        steps = 2 ** (decade if signed else decade + 1)
        top = 10.0 ** (decade + 1 - _DECADES)
        middles = [top * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
        shares += middles + ([-share for share in middles] if signed else [])
    return sorted(shares)

"""Stochastic rounding from fp32 to bf16, so that small updates are not lost on average.

Called by `adamw8bit`. The randomness is a hash of parameter, step and position in the whole
parameter, without generator state: a resume needs none, and replicas on several ranks, or shards
on another number of ranks, round alike. Gradients are summed in bf16 without stochastic rounding;
`rounding_warning` warns if that matters.
"""

import hashlib

import torch
from torch import Tensor

from finetune_trainer.config import TrainConfig

# 64 sums change a gradient by 0.8 %, 256 by 2 to 5 %, 1,024 by up to half.
MOST_SUMS_IN_BF16 = 64

_LOW_HALF = 0xFFFF  # the fp32 bits that bf16 lacks


def key_of(seed: int, name: str) -> int:
    """Return the int32 key of a parameter."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def rounded(values: Tensor, key: Tensor, rows: Tensor) -> Tensor:
    """Round values (N, B) to a neighbour in bf16; the nearer neighbour is more likely.

    Args:
        values: fp32 values, at least one.
        key: int32 scalar of parameter and step.
        rows: (N,), int32: indices of the rows within the whole parameter.
    """
    columns = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
    noise = _hash(_hash(rows ^ _hash(key))[:, None] ^ columns) & _LOW_HALF
    bits = (values.view(torch.int32) + noise) & ~_LOW_HALF
    return bits.view(torch.float32).to(torch.bfloat16)


def _hash(x: Tensor) -> Tensor:
    """Return a 32-bit hash in which each bit depends on each bit of x: MurmurHash3's finaliser.

    The mask turns torch's arithmetic shift into a logical one; products wrap around.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * -0x7A143595  # 0x85EBCA6B
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -0x3D4D51CB  # 0xC2B2AE35
    return x ^ ((x >> 16) & 0xFFFF)


def rounding_warning(config: TrainConfig, *, adds_up_whole: bool = False) -> str | None:
    """Return a warning if the bf16 sum over many micro-batches loses gradients; otherwise None.

    Args:
        config: Configuration of a native strategy.
        adds_up_whole: Whether fsdp sums unsharded gradients of a step in fp32; sharded gradients
            are summed in bf16.
    """
    micro_batches = config.gradient_accumulation_steps
    if config.training.optimizer == "adamw" or adds_up_whole or micro_batches <= MOST_SUMS_IN_BF16:
        return None
    advice = "use spec.strategy.type fsdp, which sums in fp32 if memory allows"
    if config.strategy.type == "fsdp":
        advice = "set spec.strategy.reduceEachMicroBatch to false to sum in fp32"
    return (
        f"spec.training.optimizer adamw8bit sums the gradients of {micro_batches} micro-batches "
        "in bf16, which changes them by more than 1 %; raise spec.training.microBatchSize, or "
        f"{advice}"
    )

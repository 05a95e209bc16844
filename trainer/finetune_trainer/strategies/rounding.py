"""Round fp32 to bf16 up or down by chance, so that small updates are not lost on average.

Called by `adamw8bit`. The chance is a hash of what is rounded (parameter, step, place in the whole
parameter) and no generator's state: a resume needs none, and replicas on several ranks, or shards
of another number of ranks, round alike. Gradients are added up in bf16 without it, which is warned
of where it matters.
"""

import hashlib

import torch
from torch import Tensor

from finetune_trainer.config import TrainConfig

# 64 sums change a gradient by 0.8 %, 256 by 2 to 5 %, 1,024 by up to half.
MOST_SUMS_IN_BF16 = 64

_LOW_HALF = 0xFFFF  # what of fp32's bits bf16 lacks


def key_of(seed: int, name: str) -> int:
    """Return the key of a parameter, an int32."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def rounded(values: Tensor, key: Tensor, rows: Tensor) -> Tensor:
    """Return values (N, B) in fp32 as bf16: the farther of two neighbours by its nearness.

    Args:
        values: To be rounded, at least one.
        key: A scalar in int32, of parameter and step.
        rows: Numbers (N,) in int32 of the rows within the whole parameter.
    """
    columns = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
    chance = _mixed(_mixed(rows ^ _mixed(key))[:, None] ^ columns) & _LOW_HALF
    bits = (values.view(torch.int32) + chance) & ~_LOW_HALF
    return bits.view(torch.float32).to(torch.bfloat16)


def _mixed(x: Tensor) -> Tensor:
    """Return a 32-bit hash in which each bit depends on each of x, as MurmurHash3 ends.

    The mask makes torch's arithmetic shift a logical one; products wrap around.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * -0x7A143595  # 0x85EBCA6B
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -0x3D4D51CB  # 0xC2B2AE35
    return x ^ ((x >> 16) & 0xFFFF)


def rounding_warning(config: TrainConfig, *, adds_up_whole: bool = False) -> str | None:
    """Say where so many gradients are added up in bf16 that what is added is lost in the sum.

    Args:
        config: Of a native strategy.
        adds_up_whole: fsdp keeps whole gradients over the micro-batches of a step, in fp32; where
            it divides each micro-batch's among the ranks, the parts are added up in bf16.
    """
    micro_batches = config.gradient_accumulation_steps
    if config.training.optimizer == "adamw" or adds_up_whole or micro_batches <= MOST_SUMS_IN_BF16:
        return None
    helps = "use spec.strategy.type fsdp, which adds up in fp32 where there is room"
    if config.strategy.type == "fsdp":
        helps = "set spec.strategy.reduceEachMicroBatch to false, which adds up in fp32"
    return (
        f"spec.training.optimizer adamw8bit adds up the gradients of {micro_batches} micro-batches "
        "in bf16, which changes them by more than 1 %; raise spec.training.microBatchSize, or "
        f"{helps}"
    )

"""Compute the bytes of the optimizer state of one parameter. Called by `peak`."""

from finetune_trainer.sizing.model_shape import Weight

# Block lengths of 8-bit moments, as in `strategies.blockwise`.
_LONGEST_BLOCK, _SHORTEST_BLOCK = 256, 32


def moment_nbytes(weight: Weight, shards: int, optimizer: str) -> int:
    """Return the bytes of both moments and the step count for a rank's share of a parameter."""
    share = weight.shard_nbytes(shards)
    if optimizer == "adamw":
        return 2 * share + 4
    count, block = share // weight.itemsize, block_of(weight)
    moment = 4 * count if block is None else count + 4 * count // block
    return 2 * moment + 4


def block_of(weight: Weight) -> int | None:
    """Return the number of elements per scale of an 8-bit moment; None if the moment is fp32."""
    width = weight.count // weight.rows
    lengths = range(min(_LONGEST_BLOCK, width), _SHORTEST_BLOCK - 1, -1)
    return next((length for length in lengths if width % length == 0), None)

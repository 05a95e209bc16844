"""Choose which tensors FSDP leaves unsharded between micro-batches: weights, gradients.

`fsdp` calls it once, after sharding. Both choices trade memory for collectives: unsharded weights
are gathered once per step instead of twice per micro-batch, and unsharded gradients are
reduce-scattered once per step instead of after every micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from finetune_trainer.config import StrategyConfig

# Share of the free memory that gathered layers, gradients and moments may take; activations and
# logits need the rest.
SHARE_OF_FREE_MEMORY = 0.5


@dataclass(frozen=True)
class Unsharded:
    """Tensors that stay unsharded on every rank.

    Attributes:
        weights: Whether layers stay gathered from the first micro-batch's forward to the last one's
            backward.
        gradients: Whether gradients are summed unsharded over micro-batches; otherwise they are
            reduced into the shards after each micro-batch.
    """

    weights: bool
    gradients: bool


@dataclass(frozen=True)
class Sizes:
    """Bytes on one rank: gradients and moments of its shards, unsharded weights and gradients."""

    state: int
    weights: int
    gradients: int


def choose_unsharded(
    config: StrategyConfig, sizes: Sizes, fits: Callable[[int], bool], *, accumulates: bool
) -> Unsharded:
    """Return the configured choices; unset ones depend on the free memory.

    Weights have priority, because for the same reduction of traffic they need half the memory of
    gradients.

    Args:
        config: `reshard_after_forward` and `reduce_each_micro_batch` may be None.
        sizes: Sizes on this rank.
        fits: Whether a number of bytes fits on every rank; a collective, so all ranks must make
            the same calls.
        accumulates: Whether a step has several micro-batches.
    """
    if config.reshard_after_forward is None:
        weights = fits(sizes.state + sizes.weights)
    else:
        weights = not config.reshard_after_forward
    if not accumulates:
        return Unsharded(weights, gradients=False)
    if config.reduce_each_micro_batch is None:
        gradients = fits(sizes.state + weights * sizes.weights + sizes.gradients)
    else:
        gradients = not config.reduce_each_micro_batch
    return Unsharded(weights, gradients)

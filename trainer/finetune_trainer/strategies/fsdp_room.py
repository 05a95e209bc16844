"""What FSDP keeps whole on every rank between two micro-batches: gathered weights, gradients.

`fsdp` asks once, when the shards are there. Each of the two costs memory and saves collectives:
kept weights are gathered once a step rather than twice a micro-batch, kept gradients are divided
among the ranks once a step rather than after every micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from finetune_trainer.config import StrategyConfig

# Share of the free memory that gathered layers, gradients and moments may take; activations and
# logits need the rest.
SHARE_OF_FREE_MEMORY = 0.5


@dataclass(frozen=True)
class Kept:
    """What stays whole on every rank.

    Attributes:
        weights: Gathered layers, from one micro-batch's forward to the last one's backward.
        gradients: Sums over micro-batches; else each micro-batch's are reduced into the shards.
    """

    weights: bool
    gradients: bool


@dataclass(frozen=True)
class Sizes:
    """Bytes on one rank: of its shards' gradients and moments, of whole weights and gradients."""

    state: int
    weights: int
    gradients: int


def choose_kept(
    asked: StrategyConfig, sizes: Sizes, fits: Callable[[int], bool], *, accumulates: bool
) -> Kept:
    """Return what is asked for, and where nothing is asked what there is room for.

    Weights come first: for the same bytes saved on the wire they are half as large as gradients.

    Args:
        asked: Its `reshard_after_forward` and `reduce_each_micro_batch` may be None.
        sizes: Of this rank.
        fits: Says whether so many bytes fit on every rank; a collective, so what asks for it must
            be the same on all.
        accumulates: A step has several micro-batches.
    """
    if asked.reshard_after_forward is None:
        weights = fits(sizes.state + sizes.weights)
    else:
        weights = not asked.reshard_after_forward
    if not accumulates:
        return Kept(weights, gradients=False)
    if asked.reduce_each_micro_batch is None:
        gradients = fits(sizes.state + weights * sizes.weights + sizes.gradients)
    else:
        gradients = not asked.reduce_each_micro_batch
    return Kept(weights, gradients)

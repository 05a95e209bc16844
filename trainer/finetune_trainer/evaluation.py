"""Compute the held-out loss over all rows, divided among the ranks, without storing logits."""

from collections.abc import Callable

import torch

from finetune_trainer.data.batch import eval_batches
from finetune_trainer.data.sequences import TokenDataset
from finetune_trainer.model.evaluation_mode import in_evaluation_mode
from finetune_trainer.model.loss import loss_inputs
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.world import World

# Tokens of one forward pass without gradients; activations are freed layer by layer.
MAX_TOKENS_PER_BATCH = 2048
# Rows on a GPU are padded to a multiple of this length to limit the number of shapes: each new
# shape may be compiled again and needs its own block from the allocator.
ROUND_TO_ON_GPU = 128


def held_out_loss(
    strategy: Strategy,
    dataset: TokenDataset,
    world: World,
    is_stopping: Callable[[], bool],
    *,
    round_to: int = 1,
) -> float | None:
    """Return the mean loss over all label tokens of `dataset`, the same on every rank.

    Every rank sums the losses of its batches on its device, so that the host waits for the device
    only once, at the end. One reduction adds sums and counts, so the result does not depend on how
    rows are divided among the ranks.

    Args:
        strategy: Runs the forward passes.
        dataset: Held-out rows.
        world: Ranks that share the rows.
        is_stopping: Called after each batch, a collective of the hosts; the result is None once it
            returns True.
        round_to: See `eval_batches`.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    label_tokens = 0
    with in_evaluation_mode(strategy.model):
        for batch in eval_batches(
            dataset,
            max_tokens_per_batch=MAX_TOKENS_PER_BATCH,
            rank=world.rank,
            world_size=world.world_size,
            round_to=round_to,
        ):
            loss_sum += strategy.evaluate(loss_inputs(batch, world.device))
            label_tokens += batch.label_tokens
            if is_stopping():
                return None
    totals = torch.stack([loss_sum, torch.full_like(loss_sum, label_tokens)])
    summed = world.sum(totals).tolist()  # waits for the device, once per evaluation
    return float(summed[0] / summed[1])

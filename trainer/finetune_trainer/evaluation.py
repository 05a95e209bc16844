"""The held-out loss: every row once over all ranks, no logits kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from finetune_trainer.data.batch import eval_batches
from finetune_trainer.data.sequences import TokenDataset
from finetune_trainer.model.loss import loss_inputs
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.world import World

# Tokens of one forward pass without gradients; activations are freed layer by layer.
MAX_TOKENS_PER_BATCH = 2048


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn dropout off, and put every module's mode back."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def held_out_loss(
    strategy: Strategy, dataset: TokenDataset, world: World, is_stopping: Callable[[], bool]
) -> float | None:
    """Return the mean loss over all label tokens of `dataset`, the same on every rank.

    Every rank sums the losses of its own batches; sums and counts meet in one reduction, so the
    result does not depend on how the rows were divided. After each batch `is_stopping` is asked,
    a collective; once it is true the result is None.
    """
    totals = torch.zeros(2, dtype=torch.float64)  # summed loss, label tokens
    with in_evaluation_mode(strategy.model):
        for batch in eval_batches(
            dataset,
            max_tokens_per_batch=MAX_TOKENS_PER_BATCH,
            rank=world.rank,
            world_size=world.world_size,
        ):
            inputs = loss_inputs(batch, world.device)
            totals[0] += strategy.evaluate(inputs).item()  # waits for the device
            totals[1] += batch.label_tokens
            if is_stopping():
                return None
    summed = world.sum(totals.to(world.device)).tolist()
    return float(summed[0] / summed[1])

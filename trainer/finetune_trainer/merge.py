"""Merge adapters into a copy of the base model, and prove that the copy answers alike.

`export` calls it on rank 0. The model that was trained is never changed: un-merging W + BA leaves
rounding behind.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from finetune_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel

PROBE_TOKENS = 32
# Largest relative error, in norm, of the merged model's logits: the rounding of W + BA to the
# type of W and no more, with a wide margin over what tests measure.
MERGE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Share of what the adapters do to the logits that merging may lose before the user is told.
LOST_EFFECT = 0.25


def merged_copy(model: "PeftModel", warn: "Callable[[str], None]") -> "PreTrainedModel":
    """Return a plain transformers model with the adapters added into its weights.

    The weights keep the type of the base. `warn` is told when that type is too coarse for what
    the adapters learnt.

    Raises:
        TrainerError: the merged model answers differently from base and adapters together.
    """
    adapted = probe_logits(model)
    with model.disable_adapter():
        base = probe_logits(model)
    try:
        merged = cast("PreTrainedModel", copy.deepcopy(model).merge_and_unload(safe_merge=True))
    except ValueError as error:
        raise TrainerError(f"the adapters cannot be merged: {error}; export the adapter") from error
    found = probe_logits(merged)
    gap, effect = _relative(found, adapted), _relative(base, adapted)
    dtype = next(merged.parameters()).dtype
    if not gap <= MERGE_TOLERANCE[dtype]:
        raise TrainerError(
            f"the merged model's answers differ from those of base and adapter by {gap:.2g}, "
            f"more than {MERGE_TOLERANCE[dtype]:.2g} for {dtype}; nothing was exported, use "
            "spec.output.format adapter"
        )
    if gap > LOST_EFFECT * effect:
        warn(
            f"merging into {dtype} rounds away about {min(gap / effect, 1):.0%} of what the "
            "adapter learnt; for its full effect use spec.output.format adapter or "
            "spec.training.precision fp32"
        )
    return merged


def probe_logits(model: "nn.Module") -> "Tensor":
    """Return logits (T, V) in fp32 of one fixed row of tokens, without dropout; syncs.

    Raises:
        TrainerError: they are not finite, so the model is broken.
    """
    weight = next(model.parameters())
    vocab = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    ids = torch.arange(PROBE_TOKENS, device=weight.device) * 7919 % vocab
    with torch.no_grad(), _in_evaluation_mode(model):
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    if not bool(torch.isfinite(logits).all()):
        raise TrainerError(
            "the trained model gives answers that are not finite, so it is not exported; lower "
            "spec.training.learningRate or use spec.training.precision fp32"
        )
    return logits


def _relative(found: "Tensor", expected: "Tensor") -> float:
    return float((found - expected).norm() / expected.norm())


@contextmanager
def _in_evaluation_mode(model: "nn.Module") -> Iterator[None]:
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True

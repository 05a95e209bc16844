"""Merge adapters into a copy of the base model, and prove that the copy answers alike.

`export` calls it on rank 0. The model that was trained is never changed: un-merging W + BA leaves
rounding behind.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from finetune_trainer.errors import TrainerError

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel

PROBE_TOKENS = 32
# Largest relative difference, in norm, between the logits of the merged model and those of base
# and adapters, both computed in fp32. Measured on a 30-layer model: 1e-6 before the weights are
# rounded to the type of the base, 2.5e-3 after rounding to bfloat16.
MERGE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Share of what the adapters do to the logits that rounding may lose before the user is told.
LOST_EFFECT = 0.25


def merged_copy(model: "PeftModel", warn: Callable[[str], None]) -> "PreTrainedModel":
    """Return a plain transformers model on the CPU with the adapters added into its weights.

    W + BA is added up in fp32, then rounded once to the type of the base. The answers are
    compared in fp32 too: in bfloat16 the forward pass of a deep model is noisier than a small
    adapter is strong, and nothing could be told from it. It takes 4 bytes of host memory for
    each parameter.

    Args:
        model: The adapted model, on any device; it is not changed.
        warn: Is told when the type of the base is too coarse for what the adapters learnt.

    Raises:
        TrainerError: the merged model answers differently from base and adapters together.
    """
    dtype = cast("PreTrainedModel", model.get_base_model()).dtype
    wide = _wide_copy(model)
    adapted = probe_logits(wide)
    with wide.disable_adapter():
        effect = _relative(probe_logits(wide), adapted)
    try:
        merged = cast("PreTrainedModel", wide.merge_and_unload(safe_merge=True))
    except ValueError as error:
        raise TrainerError(f"the adapters cannot be merged: {error}") from error
    _require(_relative(probe_logits(merged), adapted), torch.float32)
    if dtype != torch.float32:
        _cast_parameters(merged, dtype)
        _cast_parameters(merged, torch.float32)
        gap = _relative(probe_logits(merged), adapted)
        _require(gap, dtype)
        if gap > LOST_EFFECT * effect:
            warn(
                f"rounding the merged weights to {dtype} changes the answers by {gap:.1e}, the "
                f"whole adapter by {effect:.1e}; for its full effect use spec.output.format "
                "adapter or spec.training.precision fp32"
            )
        _cast_parameters(merged, dtype)
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


def _require(gap: float, dtype: torch.dtype) -> None:
    limit = MERGE_TOLERANCE[dtype]
    if not gap <= limit:
        raise TrainerError(
            f"the merged model's answers differ from those of base and adapter by {gap:.1e}, more "
            f"than {limit:.0e} for {dtype}, so it is not exported; use spec.output.format adapter"
        )


def _wide_copy(model: "PeftModel") -> "PeftModel":
    """Copy straight to the CPU in fp32; a copy on the device first may not fit there."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        wide = parameter.detach().to("cpu", torch.float32, copy=True)
        memo[id(parameter)] = torch.nn.Parameter(wide, requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(model, memo)


def _cast_parameters(model: "nn.Module", dtype: torch.dtype) -> None:
    """Cast parameters alone: buffers, such as rotary frequencies, stay as precise as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


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

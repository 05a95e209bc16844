"""Merge adapters into a copy of the base model, and prove that the copy answers alike.

`export` calls it on rank 0. The model that was trained is never changed: un-merging W + BA leaves
rounding behind. A quantised base is dequantised first: the adapters were trained against those
weights and not against the ones it was quantised from.
"""

import copy
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch

from finetune_trainer.errors import ExportError
from finetune_trainer.model.adapters import adapt, in_format_of_base
from finetune_trainer.model.attention import NAME as DOCUMENTS
from finetune_trainer.model.evaluation_mode import in_evaluation_mode
from finetune_trainer.model.quantize import full_weight

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel

PROBE_TOKENS = 32
# Largest relative difference, in norm, between the logits of the merged model and those of base
# and adapters, both computed in fp32. Measured on a 30-layer model: 1e-6 before the weights are
# rounded to the type of the base, 2.5e-3 after rounding to bfloat16.
MERGE_TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
# The same between the trained model where it is and its copy in fp32; the second where numbers of
# fewer bits make the difference, of which a forward pass through many layers has much.
COPY_TOLERANCE, NARROW_COPY_TOLERANCE = 1e-3, 0.3
# Share of what the adapters do to the logits that rounding may lose before the user is warned.
LOST_EFFECT = 0.25


def merged_copy(model: "PeftModel", warn: Callable[[str], None]) -> "PreTrainedModel":
    """Return a plain transformers model on the CPU with the adapters added into its weights.

    W + BA is added up in fp32, then rounded once to the type of the base. The answers are
    compared in fp32 too: in bfloat16 the forward pass of a deep model is noisier than a small
    adapter is strong, so that it would show nothing. It takes 4 bytes of host memory for
    each parameter.

    `model` may be on any device and quantised. `warn` is called when the type of the base is too
    coarse for what the adapters learnt.

    Raises:
        ExportError: the merged model answers differently from base and adapters together.
    """
    base = cast("PreTrainedModel", model.get_base_model())
    dtype, wide_dtype = base.dtype, torch.promote_types(base.dtype, torch.float32)
    is_exact = dtype == wide_dtype and not hasattr(base.config, "quantization_config")
    wide = _wide_copy(model, wide_dtype)
    adapted = probe_logits(wide)
    copied = COPY_TOLERANCE if is_exact else NARROW_COPY_TOLERANCE
    _require(_relative(probe_logits(model).cpu(), adapted), copied, dtype)
    with wide.disable_adapter():
        effect = _relative(probe_logits(wide), adapted)
    merged = cast("PreTrainedModel", wide.merge_and_unload(safe_merge=True))
    _require(_relative(probe_logits(merged), adapted), MERGE_TOLERANCE[wide_dtype], wide_dtype)
    if dtype != wide_dtype:
        _cast_parameters(merged, dtype)
        _cast_parameters(merged, wide_dtype)
        gap = _relative(probe_logits(merged), adapted)
        _require(gap, MERGE_TOLERANCE[dtype], dtype)
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
        ExportError: they are not finite, so the model is broken.
    """
    weight = next(model.parameters())
    vocab = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    ids = torch.arange(PROBE_TOKENS, device=weight.device) * 7919 % vocab
    stance = torch.compiler.set_stance("force_eager")  # no graph for a row of this length
    with stance, torch.no_grad(), in_format_of_base(model), in_evaluation_mode(model):
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    if not bool(torch.isfinite(logits).all()):
        raise ExportError(
            "the trained model gives answers that are not finite, so it is not exported; lower "
            "spec.training.learningRate or use spec.training.precision fp32"
        )
    return logits


def _require(gap: float, limit: float, dtype: torch.dtype) -> None:
    if not gap <= limit:
        raise ExportError(
            f"the merged model's answers differ from those of base and adapter by {gap:.1e}, more "
            f"than {limit:.0e} for {dtype}, so it is not exported; use spec.output.format adapter"
        )


def _wide_copy(model: "PeftModel", dtype: torch.dtype) -> "PeftModel":
    """Build base and adapters anew on the CPU, and fill in the weights the training computed with.

    Built anew, the copy has none of the layers that quantisation or speed put into the model.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        plain = built_anew(cast("PreTrainedModel", model.get_base_model()), dtype)
    wide = adapt(plain, copy.deepcopy(model.peft_config["default"]))
    with torch.no_grad():
        for name, tensor in chain(wide.named_parameters(), wide.named_buffers()):
            owner, _, leaf = name.rpartition(".")
            tensor.copy_(full_weight(model.get_submodule(owner), leaf))
    return wide


def built_anew(base: "PreTrainedModel", dtype: torch.dtype) -> "PreTrainedModel":
    """Return another model of the same class and configuration, whatever its weights.

    It attends as `base` does, as not every family can in every way; in place of our own attention
    and of kernels for GPUs alone it has the one of transformers that computes the same.
    """
    settings = copy.deepcopy(base.config)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    own = base.config._attn_implementation
    attention = "sdpa" if own == DOCUMENTS else own if own in ("sdpa", "eager") else "eager"
    plain: PreTrainedModel = type(base)._from_config(
        settings, dtype=dtype, attn_implementation=attention
    )
    plain.tie_weights()  # undone where it was built on the meta device
    plain.generation_config = base.generation_config
    return plain


def _cast_parameters(model: "nn.Module", dtype: torch.dtype) -> None:
    """Cast parameters alone: buffers, such as rotary frequencies, stay as precise as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _relative(found: "Tensor", expected: "Tensor") -> float:
    return float((found - expected).norm() / expected.norm())

"""Merge adapters into a copy of the base model, and verify that the logits are the same.

`export` calls it on rank 0. The trained model is never changed, because un-merging W + BA leaves
rounding errors. A quantised base is dequantised first, because the adapters were trained with those
weights, not with the original ones.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from finetune_trainer.errors import ExportError
from finetune_trainer.export.dtype import copy_weights, refuse_overflow
from finetune_trainer.model.adapters import adapt, in_format_of_base
from finetune_trainer.model.attention import NAME as DOCUMENTS
from finetune_trainer.model.evaluation_mode import in_evaluation_mode

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel

PROBE_TOKENS = 32
# Largest relative difference, in norm, between the logits of the merged model and of base and
# adapters, both computed in fp32. Measured on a 30-layer model: 1e-6 before the weights are
# rounded to the dtype of the base, 2.5e-3 after rounding to bfloat16.
MERGE_TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
# Largest relative difference between the trained model and its fp32 copy. The second limit applies
# if the model has fewer bits, whose rounding errors add up over many layers.
COPY_TOLERANCE, ROUNDED_COPY_TOLERANCE = 1e-3, 0.3
# Share of the adapters' effect on the logits that rounding may lose before the user is warned.
LOST_EFFECT = 0.25


def merged_copy(
    model: "PeftModel", wanted: str | None, warn: Callable[[str], None]
) -> "PreTrainedModel":
    """Return a plain transformers model on the CPU with the adapters merged into its weights.

    W + BA is computed in fp32, then rounded once. The logits are also
    compared in fp32: in bfloat16, the noise of a deep model's forward pass exceeds the effect of a
    small adapter. This takes 4 bytes of host memory per parameter.

    Args:
        model: Base and adapters, on any device, possibly quantised.
        wanted: Name of the dtype of the result; by default the dtype of the base.
        warn: Called if the dtype is too coarse for the adapters' effect.

    Raises:
        ExportError: merging changes the logits.
    """
    base = cast("PreTrainedModel", model.get_base_model())
    dtype: torch.dtype = base.dtype if wanted is None else getattr(torch, wanted)
    precise_dtype = torch.promote_types(base.dtype, torch.float32)
    is_exact = base.dtype == precise_dtype and not hasattr(base.config, "quantization_config")
    precise = _precise_copy(model, precise_dtype)
    adapted = probe_logits(precise)
    copied = COPY_TOLERANCE if is_exact else ROUNDED_COPY_TOLERANCE
    _require(_relative(probe_logits(model).cpu(), adapted), copied, base.dtype)
    with precise.disable_adapter():
        effect = _relative(probe_logits(precise), adapted)
    merged = cast("PreTrainedModel", precise.merge_and_unload(safe_merge=True))
    _require(
        _relative(probe_logits(merged), adapted), MERGE_TOLERANCE[precise_dtype], precise_dtype
    )
    if dtype != precise_dtype:
        _cast_parameters(merged, dtype)
        _cast_parameters(merged, precise_dtype)
        gap = _relative(probe_logits(merged), adapted)
        _require(gap, MERGE_TOLERANCE[dtype], dtype)
        if gap > LOST_EFFECT * effect:
            warn(
                f"rounding the merged weights to {dtype} changes the logits by {gap:.1e}, the "
                f"adapter changes them by {effect:.1e}; for its full effect use "
                "spec.output.format adapter or spec.training.precision fp32"
            )
        _cast_parameters(merged, dtype)
    return merged


def probe_logits(model: "nn.Module") -> "Tensor":
    """Return fp32 logits (T, V) of one fixed row of tokens, without dropout; syncs.

    Raises:
        ExportError: the logits are not finite, so the model is broken.
    """
    weight = next(model.parameters())
    vocab = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    ids = torch.arange(PROBE_TOKENS, device=weight.device) * 7919 % vocab
    stance = torch.compiler.set_stance("force_eager")  # no graph for a row of this length
    with stance, torch.no_grad(), in_format_of_base(model), in_evaluation_mode(model):
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    if not bool(torch.isfinite(logits).all()):
        raise ExportError(
            "the logits of the trained model are not finite, so it is not exported; lower "
            "spec.training.learningRate or use spec.training.precision fp32"
        )
    return logits


def _require(gap: float, limit: float, dtype: torch.dtype) -> None:
    if not gap <= limit:
        raise ExportError(
            f"merging base and adapter changes the logits by {gap:.1e}, more than {limit:.0e} for "
            f"{dtype}, so the merged model is not exported; use spec.output.format adapter"
        )


def _precise_copy(model: "PeftModel", dtype: torch.dtype) -> "PeftModel":
    """Rebuild base and adapters on the CPU, with the weights that the training computed with.

    The rebuilt copy has none of the layers that were replaced for quantisation or speed.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        plain = rebuilt(cast("PreTrainedModel", model.get_base_model()), dtype)
    precise = adapt(plain, copy.deepcopy(model.peft_config["default"]))
    copy_weights(precise, model)
    return precise


def cast_copy(model: "PreTrainedModel", dtype: torch.dtype) -> "PreTrainedModel":
    """Return a copy on the CPU with parameters of another dtype.

    Raises:
        ExportError: a weight exceeds the range of the dtype.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        plain = rebuilt(model, dtype)
    copy_weights(plain, model)
    return plain


def rebuilt(base: "PreTrainedModel", dtype: torch.dtype) -> "PreTrainedModel":
    """Return a new model of the same class and configuration, with arbitrary weights.

    The attention implementation is the same as in `base`, because not every family supports every
    implementation. Our own attention and GPU kernels are replaced by their equivalent in
    transformers.
    """
    settings = copy.deepcopy(base.config)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    parts = {name: getattr(base.config, name, None) for name in base.config.sub_configs}
    attention: Any = _plain_attention(base.config)
    if any(part is not None for part in parts.values()):  # a tower may need another one
        named = {name: _plain_attention(part) for name, part in parts.items() if part is not None}
        attention = {"": attention, **named}
    plain: PreTrainedModel = type(base)._from_config(
        settings, dtype=dtype, attn_implementation=attention
    )
    plain.tie_weights()  # construction on the meta device unties them
    plain.generation_config = base.generation_config
    plain._weight_conversions = getattr(base, "_weight_conversions", None)  # the names in its files
    return plain


def _plain_attention(settings: Any) -> str:
    """Return the implementation of transformers that is closest to the one in use."""
    own = settings._attn_implementation
    return "sdpa" if own == DOCUMENTS else own if own in ("sdpa", "eager") else "eager"


def _cast_parameters(model: "nn.Module", dtype: torch.dtype) -> None:
    """Cast only parameters: buffers, such as rotary frequencies, retain their precision."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype)
        refuse_overflow(name, parameter)


def _relative(found: "Tensor", expected: "Tensor") -> float:
    return float((found - expected).norm() / expected.norm())

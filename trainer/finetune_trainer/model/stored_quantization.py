"""Treat base models whose files are already quantised.

`rank` resolves the method before the model is loaded, and `load` reads the files accordingly. Files
of bitsandbytes are trained with adapters as QLoRA of their kind. Files of mxfp4 (gpt-oss) and fp8
(DeepSeek-V3) are dequantised while they are read. Others are refused.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.refusals import Refusals

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_DEQUANTISED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
_SHARDED_AFTER_LOADING = ("fsdp", "zero3")


def stored_kind(settings: "PretrainedConfig") -> str | None:
    """Return how the files of a model are quantised; None if they are not.

    `nf4` and `int8` are formats of bitsandbytes; transformers gives the other names.
    """
    found: Any = getattr(settings, "quantization_config", None)
    if found is None:
        return None
    values: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    if values.get("load_in_8bit"):
        return "int8"
    if values.get("load_in_4bit"):
        return str(values.get("bnb_4bit_quant_type", "fp4"))
    return str(values.get("quant_method", "unknown"))


def resolve_stored_quantization(
    config: TrainConfig, settings: "PretrainedConfig", refusals: Refusals
) -> TrainConfig:
    """Return the configuration that trains a model as its files are stored.

    LoRA on files of bitsandbytes becomes QLoRA. A whole model of dequantised files is exported in
    bfloat16.

    Args:
        config: Configuration of the run.
        settings: The model's `config.json`.
        refusals: Receives an error if the files cannot be trained with this method.

    Raises:
        ConfigError: see `refusals`.
    """
    kind = stored_kind(settings)
    if kind is None:
        return config
    if sentence := _why_not(kind, config):
        refusals.refuse(ConfigError(f"spec.model.source {config.model.path} {sentence}"))
        return config
    if kind in _DEQUANTISED:
        if config.output.dtype is not None or config.output.format == "adapter":
            return config
        output = config.output.model_copy(update={"dtype": "bfloat16"})
        return config.model_copy(update={"output": output})
    method = config.method.model_copy(update={"type": "qlora", "quantization": kind})
    return config.model_copy(update={"method": method})


def _why_not(kind: str, config: TrainConfig) -> str:
    """Return why files of this kind cannot be trained with the method; empty if they can."""
    method, strategy = config.method, config.strategy.type
    if kind in _DEQUANTISED:
        if method.quantization != "none":
            return (
                f"is stored in {kind}, which is dequantised, so spec.method.quantization "
                f"{method.quantization} would quantise it a second time; use spec.method.type lora"
            )
        return ""
    if kind not in ("nf4", "int8"):
        return (
            f"is quantised with {kind}, which cannot be trained; set spec.model.source to the "
            "model from which it was quantised"
        )
    if method.type == "full":
        return (
            f"is stored in {kind}, whose weights cannot be trained; use spec.method.type qlora, or "
            "set spec.model.source to the model from which it was quantised"
        )
    if method.quantization not in ("none", kind):
        return (
            f"is stored in {kind}, and spec.method.quantization is {method.quantization}; set it "
            f"to {kind}"
        )
    if strategy in _SHARDED_AFTER_LOADING:
        return (
            f"is stored in {kind}, which spec.strategy.type {strategy} cannot shard; use ddp, or "
            "set spec.model.source to the model from which it was quantised"
        )
    return ""


def prepare_settings(settings: "PretrainedConfig", dtype: "torch.dtype") -> Any:
    """Return the `quantization_config` of `from_pretrained` for files that are quantised.

    4-bit layers of the files compute in `dtype`.
    """
    kind = stored_kind(settings)
    if kind in _DEQUANTISED:
        import transformers

        return getattr(transformers, _DEQUANTISED[kind])(dequantize=True)
    if kind == "nf4":
        settings.quantization_config["bnb_4bit_compute_dtype"] = str(dtype).removeprefix("torch.")
    return None


def refuse_unread_scales(
    kind: str | None, unexpected: Iterable[str], path: str, refusals: Refusals
) -> None:
    """Refuse files whose scales have names that transformers does not read.

    Args:
        kind: Result of `stored_kind`.
        unexpected: Names in the files that the model does not have.
        path: Folder, or name on the hub.
        refusals: Receives the error.
    """
    ends = ("_scale", "_scale_inv", "_scales")
    lost = sorted(
        name
        for name in unexpected
        if name.endswith(ends) and not name.endswith(("input_scale", "activation_scale"))
    )
    if kind in _DEQUANTISED and lost:
        refusals.refuse(
            ConfigError(
                f"spec.model.source {path} is stored in {kind} with scales that are not read "
                f"({lost[0]} and {len(lost) - 1} more), so its weights would be wrong; set it to "
                "the model from which it was quantised"
            )
        )


def finish_dequantizing(model: "PreTrainedModel", kind: str, dtype: "torch.dtype") -> None:
    """Cast a dequantised model, some of whose weights keep the dtype of the files, to `dtype`.

    A model of any kind is saved as a plain model, under the names of its files.
    """
    _drop_quantised_names(model)
    if kind in _DEQUANTISED:
        vars(model.config).pop("quantization_config", None)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)


def _drop_quantised_names(model: "PreTrainedModel") -> None:
    """Drop the conversions that would quantise the model again when it is saved.

    The prefix that the names in the files have stays.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used = getattr(model, "_weight_conversions", None) or ()
    prefixes = [one.source_patterns for one in used if isinstance(one, PrefixChange)]
    model._weight_conversions = [
        one
        for one in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(one, PrefixChange) or one.source_patterns in prefixes
    ]

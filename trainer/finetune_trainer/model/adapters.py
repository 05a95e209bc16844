"""Attach LoRA adapters through peft; the only file that imports it for training."""

import warnings
from typing import TYPE_CHECKING

from finetune_trainer.config import LoraSettings
from finetune_trainer.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def attach_lora(model: "PreTrainedModel", settings: LoraSettings) -> "PeftModel":
    """Freeze the base and add adapters to the named linear layers, or to all but the head.

    Adapter weights are fp32 whatever the base is stored in, so that small updates are not lost.

    Raises:
        ConfigError: a name in `target_modules` matches no layer, or the layer cannot be adapted.
    """
    from peft import LoraConfig, get_peft_model

    missing = [name for name in settings.target_modules if not _matches(model, name)]
    if missing:
        raise ConfigError(
            f"spec.method.lora.targetModules {', '.join(missing)} match no linear layer of the "
            f"model; it has {', '.join(_linear_names(model))}"
        )
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules) or "all-linear",
    )
    try:
        with warnings.catch_warnings():
            # peft 0.21 asks transformers by a name that 5.23 calls deprecated; nobody can mend it.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            return get_peft_model(model, lora, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ConfigError(f"spec.method.lora.targetModules cannot be adapted: {error}") from error


def _linear_names(model: "PreTrainedModel") -> list[str]:
    from torch import nn

    names = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    return sorted(names)


def _matches(model: "PreTrainedModel", ending: str) -> bool:
    from torch import nn

    return any(
        name == ending or name.endswith(f".{ending}")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    )

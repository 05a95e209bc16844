"""Load tokenizer and base model with transformers, never with remote code.

`rank` calls it. It does not depend on the strategy, and returns an unwrapped model on the CPU or
GPU.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import ModelConfig, TrainConfig
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.template import with_arguments
from finetune_trainer.errors import ConfigError
from finetune_trainer.links import leads_back
from finetune_trainer.model.completeness import refuse_random_weights
from finetune_trainer.model.folder_advice import (
    about_tokenizer,
    about_weights,
    explained,
    refuse_model_with_adapter,
)
from finetune_trainer.model.quantize import (
    insert_unquantized_4bit_layers,
    quantization_config,
    unquantized_warning,
    use_pure_products,
)
from finetune_trainer.model.snapshot import folder_with_weights, model_folder
from finetune_trainer.model.stored_quantization import (
    finish_dequantizing,
    prepare_settings,
    refuse_unread_scales,
    stored_kind,
)
from finetune_trainer.model.tokenizer_file import use_own_file
from finetune_trainer.refusals import STRICT, Refusals
from finetune_trainer.sizing.method import base_precision, is_loaded_once
from finetune_trainer.world import World

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Fields of model configurations that hold the dropout of their own layers.
_DROPOUT_FIELDS = (
    "attention_dropout",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "resid_pdrop",
)


def load_tokenizer(config: ModelConfig, rules: Rules = Rules.CURRENT) -> "PreTrainedTokenizerBase":
    """Load the model's tokenizer with the template and the special tokens of the configuration.

    A missing padding token becomes the end token. `rules` is the version by which rows are read.

    Raises:
        ConfigError: the tokenizer cannot be found or read, the template is not valid Jinja or does
            not read an argument, or a token to add already exists.
    """
    from transformers import AutoTokenizer

    folder = _folder(config)
    advice = partial(about_tokenizer, str(folder))
    with explained(f"spec.model.source: the tokenizer of {config.path}", advice):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        if rules is not Rules.RELEASE_0_1_0:
            use_own_file(tokenizer, folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        _check_template(config.chat_template)
        tokenizer.chat_template = config.chat_template
    if config.chat_template_arguments:
        with explained(f"spec.model.source: the chat template of {config.path}"):
            _set_template_arguments(tokenizer, config.chat_template_arguments)
    _add_tokens(tokenizer, config.add_tokens)
    return tokenizer


def _folder(config: ModelConfig) -> Path:
    """Return the folder of a model, without weights if the hub has it.

    Raises:
        ConfigError: the path of a local model is not a folder, or as `model_folder`.
    """
    folder = model_folder(config)
    if folder.is_dir():
        return folder
    if leads_back(folder):
        reason = "is a symbolic link that leads back to itself; remove it"
    else:
        reason = "is not a folder; check the path"
    raise ConfigError(f"spec.model.source {folder} {reason}")


def new_token_ids(config: ModelConfig) -> list[int]:
    """Return the token ids of `add_tokens` in the tokenizer."""
    if not config.add_tokens:
        return []
    ids: list[int] = load_tokenizer(config).convert_tokens_to_ids(list(config.add_tokens))
    return ids


def load_device(config: TrainConfig, rank: int, device: "torch.device") -> "torch.device":
    """Return the device on which a rank that computes on `device` loads the model."""
    import torch

    if not is_loaded_once(config):
        return device
    return torch.device("cpu" if rank == 0 else "meta")


def download_weights(config: TrainConfig, world: World) -> None:
    """Download the weights by one rank of each node on which a rank loads them.

    Raises:
        ConfigError: as `folder_with_weights`.
    """
    if world.local_rank == 0 and load_device(config, world.rank, world.device).type != "meta":
        folder_with_weights(config.model)


def load_settings(config: ModelConfig) -> "PretrainedConfig":
    """Read the model's `config.json` with transformers.

    Raises:
        ConfigError: the file cannot be found or read, or names a family that transformers lacks.
    """
    from transformers import AutoConfig

    folder = _folder(config)
    with explained(f"spec.model.source: the model of {config.path}"):
        settings: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False
        )
    parts: list[Any] = [settings, getattr(settings, "text_config", None)]
    for part in parts:
        pad, size = getattr(part, "pad_token_id", None), getattr(part, "vocab_size", None)
        if isinstance(pad, int) and isinstance(size, int) and pad >= size:
            part.pad_token_id = None  # the embedding would refuse it; it changes no loss
    return settings


def load_model(
    config: TrainConfig,
    device: "torch.device",
    refusals: Refusals = STRICT,
    *,
    quantises: bool = True,
) -> "PreTrainedModel":
    """Load the base model for training: trained parameters in fp32, frozen ones in 16 bits or less.

    With adapters the frozen base is stored in the compute dtype, or quantised. With full
    fine-tuning every parameter stays in fp32 and autocast casts only the arithmetic, unless the
    optimizer stores parameters in bf16 or the strategy is ZeRO. On the meta device the model has
    buffers but no weights. There, and with `quantises` false, 4-bit layers still have plain
    weights; moving them to a device quantises them.

    Raises:
        ConfigError: the model cannot be found or read, its files lack a weight, `training.dropout`
            has no effect on it, or it cannot be quantised as requested.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar per rank would interleave with the run's own lines
    source, dtype = config.model, _base_dtype(config)
    quantization = quantization_config(config, dtype)
    settings = load_settings(source)
    folder = _folder(source) if device.type == "meta" else folder_with_weights(source)
    refuse_model_with_adapter(source, folder, refusals)
    advice = partial(about_weights, str(folder))
    with explained(f"spec.model.source: the model of {source.path}", advice):
        _set_dropout(settings, config.training.dropout)
        stored = stored_kind(settings)
        if stored is not None:  # `resolve_stored_quantization` has decided that it can be loaded
            quantization = prepare_settings(settings, dtype)
        if device.type == "meta":
            model = without_weights(settings, dtype)
        else:
            model, found = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=settings,
                dtype=dtype,
                quantization_config=quantization if quantises or stored else None,
                device_map={"": device},
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported with their names below
                output_loading_info=True,
            )
            refuse_random_weights(model, found, source.path)
            refuse_unread_scales(stored, found["unexpected_keys"], source.path, refusals)
        if stored is not None:
            finish_dequantizing(model, stored, dtype)
        elif quantization is not None and (device.type == "meta" or not quantises):
            insert_unquantized_4bit_layers(model, quantization)
    use_pure_products(model)
    if config.method.quantization != "none" and (sentence := unquantized_warning(model)):
        refusals.warn(f"spec.method.quantization {config.method.quantization}: {sentence}")
    if source.add_tokens:
        add_rows(model, new_token_ids(source))
    model.train()
    return model


def without_weights(
    settings: "PretrainedConfig", dtype: "torch.dtype | None" = None
) -> "PreTrainedModel":
    """Build the model with real buffers (rotary frequencies) and parameters on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            settings, dtype=dtype, trust_remote_code=False
        )
    model.tie_weights()  # the move to the meta device unties them
    return model


def base_name(config: ModelConfig) -> str | None:
    """Return a name by which another machine can load the base; None if unknown."""
    if config.base_name:
        return config.base_name
    folder = Path(config.path)
    if not folder.is_absolute():
        return config.path
    recorded = json.loads((folder / "config.json").read_text()).get("_name_or_path")
    return recorded if recorded and not Path(recorded).is_absolute() else None


def _base_dtype(config: TrainConfig) -> "torch.dtype":
    """Return the dtype of parameters that are not quantised."""
    import torch

    formats = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }
    return formats[base_precision(config)]


def _check_template(template: str) -> None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)  # without conversations: only compiles
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"spec.model.chatTemplate is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error


def _set_template_arguments(
    tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, str | int | float | bool]
) -> None:
    """Write the arguments into the template, so the exported model has them, too."""
    template = tokenizer.chat_template
    if template is None:
        raise ConfigError(
            "spec.model.chatTemplateArguments has no effect: the model has no chat template; "
            "remove it, or give one (spec.model.chatTemplate)"
        )
    given = tokenizer.special_tokens_map
    if isinstance(template, str):
        tokenizer.chat_template = with_arguments(template, arguments, given)
    else:
        tokenizer.chat_template = {
            name: with_arguments(text, arguments, given) for name, text in template.items()
        }


def _add_tokens(tokenizer: "PreTrainedTokenizerBase", tokens: tuple[str, ...]) -> None:
    known = set(tokenizer.get_vocab()) if tokens else set()
    for token in tokens:
        if not token.strip():
            raise ConfigError("spec.model.addTokens names a token without text; remove it")
        if token in known:
            raise ConfigError(
                f"spec.model.addTokens {token} is already in the vocabulary, or named twice; "
                "remove it"
            )
        known.add(token)
    tokenizer.add_tokens(list(tokens), special_tokens=True)


def add_rows(model: "PreTrainedModel", tokens: list[int]) -> None:
    """Set the rows of new tokens in embedding and head to the mean of the other rows.

    A model whose vocabulary is padded already has room for them.
    """
    import torch

    if max(tokens) >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(max(tokens) + 1, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        with torch.no_grad():
            known = layer.weight[: min(tokens)]
            layer.weight[tokens] = known.mean(0, dtype=known.dtype)


def _set_dropout(settings: object, dropout: float | None) -> None:
    if dropout is None:
        return
    present = [name for name in _DROPOUT_FIELDS if hasattr(settings, name)]
    if not present:
        raise ConfigError(
            f"spec.training.dropout {dropout} has no effect: this model has no dropout of its own; "
            "remove it (spec.method.lora.dropout acts on adapters)"
        )
    for name in present:
        setattr(settings, name, dropout)

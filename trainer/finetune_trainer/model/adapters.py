"""Select the trained parameters: adapters attached by peft, or all weights except frozen ones.

Called by `rank` with the loaded base. The only file that imports peft for training.
"""

import fnmatch
import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import LoraSettings, ModelConfig, TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.folder_advice import explained
from finetune_trainer.model.load import base_name, new_token_ids
from finetune_trainer.refusals import STRICT, Refusals

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from torch import nn
    from transformers import PreTrainedModel

# Settings that must match those of an adapter to start from: name in peft, field of the job.
_SHARED = {
    "peft_type": "spec.method.type",
    "r": "spec.method.lora.r",
    "lora_alpha": "spec.method.lora.alpha",
    "use_rslora": "spec.method.lora.rslora",
    "use_dora": "spec.method.lora.dora",
    "trainable_token_indices": "spec.model.addTokens",
    "rank_pattern": "spec.method.lora.r",
    "alpha_pattern": "spec.method.lora.alpha",
}


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
# Initialisations of peft after which the base has its own weights; others move a part of the base
# into the adapter (pissa, olora, corda, loftq, lora_ga).
_STARTS_THAT_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a model's configuration that hold the number of experts of a layer."""


def choose_trained(
    model: "PreTrainedModel",
    config: TrainConfig,
    refusals: Refusals = STRICT,
    unreached: Sequence[str] = (),
) -> "PreTrainedModel | PeftModel":
    """Return the model in which exactly the parameters that `config` trains require gradients.

    The own weights of `unreached` modules are not trained, and get no adapters.

    Raises:
        ConfigError: adapters do not fit the model, the adapter to start from has other settings
            or another base, or `freeze` matches no or every parameter.
    """
    if config.method.lora is not None:
        new_tokens = new_token_ids(config.model)
        adapted = attach_lora(model, config.method.lora, new_tokens, unreached)
        if config.method.lora.start_from is not None:
            _start_from(adapted, Path(config.method.lora.start_from), config.model, refusals)
        return adapted
    _freeze(model, config.method.freeze)
    for name in unreached:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            parameter.requires_grad_(False)
    if config.model.add_tokens and not model.get_input_embeddings().weight.requires_grad:
        raise ConfigError(
            "spec.model.addTokens would never be trained: spec.method.freeze freezes the "
            "embeddings; remove one of the two"
        )
    return model


def attach_lora(
    model: "PreTrainedModel",
    settings: LoraSettings,
    new_tokens: Sequence[int] = (),
    unreached: Sequence[str] = (),
) -> "PeftModel":
    """Freeze the base and add adapters to the named linear layers.

    Without names, all linear layers except the head and the `routers` of experts are adapted.

    Adapter weights are fp32 regardless of the dtype of the base, so small updates are not lost.

    The rows of `new_tokens` in embedding and head are trained, too. Modules in `unreached` get no
    adapters.

    Raises:
        ConfigError: a name in `target_modules` matches no layer, or the layer cannot be adapted.
    """
    from peft import LoraConfig
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D)  # the same classes as in peft's all-linear
    linear = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    ends = settings.target_modules
    missing = [end for end in ends if not any(f".{name}".endswith(f".{end}") for name in linear)]
    if missing:
        known = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ConfigError(
            f"spec.method.lora.targetModules {', '.join(missing)} match no linear layer of the "
            f"model; it has {', '.join(known)}"
        )
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules) or "all-linear",
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        trainable_token_indices=_token_rows(model, list(new_tokens)),
    )
    lora.exclude_modules = list(unreached) or None
    if not settings.target_modules:
        _exclude_routers(model, lora)
    try:
        return adapt(model, lora)
    except ValueError as error:
        raise ConfigError(f"spec.method.lora.targetModules cannot be adapted: {error}") from error


def routers(model: "PreTrainedModel") -> list[str]:
    """Return the names of the modules that select or weight experts.

    A router decides with few weights where every token goes. Adapted without the loss that balances
    the experts, it would unlearn the balance. Routers are recognised by their class, the class of
    their parent, or their width, because names differ. Not all are linear layers, but peft also
    adapts routers that were linear layers in an earlier version.
    """
    from torch import nn

    text = model.config.get_text_config()
    counts = {getattr(text, name, None) for name in NUM_EXPERTS} - {None, 0, 1}
    if not counts:
        return []
    modules = dict(model.named_modules())

    def is_router(name: str, module: "nn.Module") -> bool:
        is_linear = isinstance(module, nn.Linear)
        if is_linear and (module.out_features == 1 or module.out_features in counts):
            return True
        around = [name.rsplit(".", up)[0] for up in range(3) if name.count(".") >= up]
        if not any("Router" in type(modules[one]).__name__ for one in around):
            return False
        return is_linear or any(p.ndim == 2 for p in module.parameters(recurse=False))

    return [name for name, module in modules.items() if is_router(name, module)]


def _exclude_routers(model: "PreTrainedModel", lora: "LoraConfig") -> None:
    """Exclude the routers of experts from "all-linear"."""
    names = routers(model)
    if not names:
        return
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
        get_model_conversion_mapping,
    )

    lora.exclude_modules = [*names, *(lora.exclude_modules or ())]
    # When peft attaches adapters, it adds experts that are stacked in a parameter, and routers
    # beside them, without regard to exclusions. The list is converted here, so that
    # peft does not extend it later.
    convert_peft_config_for_transformers(lora, model, get_model_conversion_mapping(model))
    own = {
        f".{name}.{parameter}"
        for name in names
        for parameter, _ in model.get_submodule(name).named_parameters(recurse=False)
    }
    lora.target_parameters = [
        target
        for target in sorted(lora.target_parameters or ())
        if not any(parameter.endswith(f".{target}") for parameter in own)
    ] or None


def adapt(model: "PreTrainedModel", lora: "LoraConfig") -> "PeftModel":
    """Attach adapters according to peft's own configuration."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.23 deprecates; users cannot fix that.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # peft detects itself that Conv1D stores its weight transposed, and warns.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        # peft applies these to stacked experts, but looks for them among modules only.
        warnings.filterwarnings("ignore", "The following \\w+_pattern keys", RuntimeWarning)
        return get_peft_model(model, lora, autocast_adapter_dtype=True)


def load_adapter(model: "PreTrainedModel", folder: Path) -> "PeftModel":
    """Return the base with the exported adapter in `folder` attached.

    Raises:
        ConfigError: the adapter cannot be read, is not LoRA, or belongs to another base.
    """
    from peft import LoraConfig, get_peft_model_state_dict, load_peft_weights
    from peft import set_peft_model_state_dict as set_weights

    advice = "take folder and base from one run"
    with explained(f"the adapter in {folder}", lambda: advice):
        if not (folder / ADAPTER_FILE).is_file():
            raise ConfigError(f"{folder} has no {ADAPTER_FILE}, and other formats are not read")
        kind = json.loads((folder / ADAPTER_CONFIG).read_text()).get("peft_type")
        if kind != "LORA":
            raise ConfigError(f"{folder} holds an adapter of type {kind}; only LORA is loaded")
        lora = LoraConfig.from_pretrained(str(folder))
        lora.base_model_name_or_path = model.name_or_path  # peft warns of another name
        adapted = adapt(model, lora)
        found = load_peft_weights(str(folder), device="cpu")
        wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        if {name: one.shape for name, one in found.items()} != {
            name: one.shape for name, one in wanted.items()
        }:
            raise ConfigError(
                f"the adapter in {folder} does not fit {type(model).__name__} of "
                f"{model.name_or_path}: other layers or sizes; {advice}"
            )
        set_weights(adapted, found)
    return adapted


def in_format_of_base(model: "nn.Module") -> "torch.autocast":
    """Return the context in which fp32 adapters compute in the 16-bit dtype of their base."""
    import torch

    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    is_16_bit = embedding.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(
        embedding.device.type, dtype=embedding.dtype if is_16_bit else None, enabled=is_16_bit
    )


def _token_rows(model: "PreTrainedModel", tokens: list[int]) -> dict[str, list[int]] | None:
    """Map embedding and head to the rows of `tokens`; peft itself follows tied weights."""
    if not tokens:
        return None
    layers: list[Any] = [model.get_input_embeddings()]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not layers[0].weight:
        layers.append(head)
    return {name: tokens for name, module in model.named_modules() if module in layers}


def _start_from(model: "PeftModel", folder: Path, base: ModelConfig, refusals: Refusals) -> None:
    """Load the weights of an adapter that another run exported.

    Raises:
        ConfigError: the folder holds no adapter, or one with other settings or another base.
    """
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    field = f"spec.method.lora.startFrom {folder}"
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{field} holds no {ADAPTER_CONFIG}; name the folder of an adapter")
    with explained(f"{field}: the adapter"):
        theirs: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text())
        ours = model.peft_config["default"]
        _check_base(theirs, field, base, refusals)
        found = load_peft_weights(str(folder), device="cpu")
    for key, name in _SHARED.items():
        their, our = theirs.get(key), getattr(ours, key)
        if (their or None) != (our or None):
            raise ConfigError(
                f"{field} has {key} {their}, this job {our}; set {name} to the value of the adapter"
            )
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    if found.keys() != wanted.keys():
        raise ConfigError(
            f"{field} adapts {_adapted(found)}, this job {_adapted(wanted)}, or another number of "
            "them; set spec.method.lora.targetModules to the modules of the adapter"
        )
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise ConfigError(
                f"{field} belongs to another base model: its {name} is {tuple(found[name].shape)}, "
                f"here {tuple(tensor.shape)}; set spec.model.source to that base, or remove it"
            )
    if model.device.type == "meta":
        return  # rank 0 broadcasts its weights
    set_peft_model_state_dict(model, found)


def _check_base(adapter: dict[str, Any], field: str, base: ModelConfig, refusals: Refusals) -> None:
    """Check that an adapter belongs to the weights of the base model."""
    start = adapter.get("init_lora_weights", True)
    if isinstance(start, str) and start not in _STARTS_THAT_KEEP_THE_BASE:
        refusals.refuse(
            ConfigError(
                f"{field} was initialised by {start}, which changes the weights of the base model; "
                "convert it with peft (save_pretrained with path_initial_model_for_weight_"
                "conversion), or merge it and set spec.model.source to the merged model"
            )
        )
    if adapter.get("alora_invocation_tokens"):
        refusals.refuse(
            ConfigError(
                f"{field} is an aLoRA, active only after its invocation tokens, and would be "
                "trained as active everywhere; start from another adapter, or leave it out"
            )
        )
    theirs = adapter.get("base_model_name_or_path")
    if theirs and not _may_be_same(theirs, base):
        refusals.warn(
            f"{field} was trained on {theirs}, and this job trains {base_name(base) or base.path}; "
            "if that is another model, set spec.model.source to the base of the adapter"
        )


def _may_be_same(theirs: str, base: ModelConfig) -> bool:
    """Whether a recorded base may be this one: the same name, or a folder named as on the hub."""
    ours = {base.path, base_name(base) or base.path}
    if theirs in ours:
        return True
    folders = [Path(one).is_absolute() for one in (theirs, *ours)]
    return len({*folders}) == 2 and any(Path(theirs).name == Path(one).name for one in ours)


def _adapted(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names}))


def _freeze(model: "nn.Module", patterns: Sequence[str]) -> None:
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        frozen = fnmatch.filter(parameters, pattern)
        if not frozen:
            names = list(parameters)
            examples = ", ".join((names[0], names[len(names) // 2], names[-1]))
            raise ConfigError(
                f"spec.method.freeze {pattern} matches no parameter; names are like {examples}"
            )
        for name in frozen:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"spec.method.freeze {', '.join(patterns)} freezes every parameter, so no parameter "
            "would be trained; remove a pattern"
        )

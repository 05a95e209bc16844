"""Try the export before training: build everything except the weights.

`rank` calls it on rank 0 once the model is loaded and adapted. Class, attention, adapters, names,
shapes, weight format, configuration, tokenizer and card are the same as after the training and do
not depend on the weights, so an error here would also occur after the training.
"""

import copy
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch

from finetune_trainer.config import TrainConfig
from finetune_trainer.control import is_out_of_memory
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.export.beside import CompanionFiles
from finetune_trainer.export.merge import rebuilt
from finetune_trainer.export.output import layout, name_base
from finetune_trainer.model.adapters import adapt
from finetune_trainer.model.loss import base_of
from finetune_trainer.refusals import STRICT, Refusals

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def try_export(
    model: "nn.Module",
    tokenizer: "PreTrainedTokenizerBase",
    config: TrainConfig,
    stops: Sequence[int] = (),
    refusals: Refusals = STRICT,
) -> None:
    """Build the files of an export of `model`, without weights, in a temporary folder.

    Neither the model nor the random numbers of the run change. See `export` for the arguments.

    Raises:
        ConfigError: the export cannot be built; the message states the format and the reason. Or,
            in a new run, the adapters cannot be merged because their layer shares its weight.
        TrainerError: there is no room for temporary files.
    """
    for kind, _ in layout(config):
        if kind == "model" and hasattr(model, "peft_config"):
            _refuse_tied(cast("PeftModel", model), config, refusals)
        try:
            with (
                TemporaryDirectory(prefix="finetune-export-") as folder,
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # the real export will show them
                companions = CompanionFiles.of(
                    model, tokenizer, config, stops=stops, warn=warnings.warn
                )
                if kind == "adapter":
                    _try_adapter(cast("PeftModel", model), Path(folder), config)
                else:
                    _try_model(model, Path(folder))
                companions.write(kind, Path(folder))
        except TrainerError:
            raise
        except Exception as error:  # of any library: it would occur again after the training
            if isinstance(error, OSError) and error.errno is not None:
                raise TrainerError(
                    f"the export cannot be tested ({error}); make room for temporary files, or "
                    "set TMPDIR to a folder on a disk with free space"
                ) from error
            if is_out_of_memory(error):
                raise
            raise ConfigError(_failure_message(kind, base_of(model), config, error)) from error


def _refuse_tied(model: "PeftModel", config: TrainConfig, refusals: Refusals) -> None:
    """Refuse adapters that cannot be merged because of tied weights."""
    base = base_of(model)
    if shared := _adapted_shared(model):
        refusals.refuse(_shared_error(shared, config))
        return
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    is_tied = base._tied_weights_keys and getattr(base.config, "tie_word_embeddings", False)
    if is_tied and head is not None and _plain(head).weight is not _plain(embedding).weight:
        refusals.refuse(
            ConfigError(
                f"spec.output.format {config.output.format}: config.json of {config.model.path} "
                "has tie_word_embeddings true, but its files hold a head that differs from the "
                "embeddings, so the merged model would have other logits; set it to false there"
            )
        )


def _plain(layer: Any) -> Any:
    """Return a layer without the rows of added tokens that peft trains beside it."""
    rows = getattr(layer, "token_adapter", None)
    return layer if rows is None else rows.get_base_layer()


def _adapted_shared(model: "nn.Module") -> tuple[str, str] | None:
    """Return an adapted layer and another module with the same weight; None if there is none.

    A merge into the layer would change the other module as well.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners: dict[int, list[str]] = {}
    for name, parameter in base_of(model).named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.replace("base_layer.", ""))
    for layer in base_of(model).modules():
        if isinstance(layer, BaseTunerLayer) and not isinstance(layer, TrainableTokensLayer):
            for parameter in layer.get_base_layer().parameters(recurse=False):
                first, *others = owners[id(parameter)]
                if others:
                    return others[-1], first
    return None


def _shared_error(shared: tuple[str, str], config: TrainConfig) -> ConfigError:
    adapted, other = (name.rpartition(".")[0] for name in shared)
    targets = config.method.lora.target_modules if config.method.lora else ()
    return ConfigError(
        f"spec.output.format {config.output.format}: the adapters of {adapted} cannot be merged, "
        f"because the model ties its weight to {other}, which would change as well; remove "
        f"{adapted.rpartition('.')[2]} from spec.method.lora.targetModules ({', '.join(targets)}), "
        "or set spec.output.format adapter"
    )


def _try_adapter(model: "PeftModel", folder: Path, config: TrainConfig) -> None:
    from peft import get_peft_model_state_dict

    if not get_peft_model_state_dict(model, save_embedding_layers=False):
        raise ValueError("it would have no weights")
    model.create_or_update_model_card(str(folder))
    model.peft_config["default"].save_pretrained(str(folder))
    name_base(folder, config)


def _try_model(model: "nn.Module", folder: Path) -> None:
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    whole: PreTrainedModel
    if hasattr(model, "peft_config"):
        whole = _empty_copy(cast("PeftModel", model)).merge_and_unload()
    else:
        whole = _empty(cast("PreTrainedModel", model))
    whole.config.save_pretrained(folder)
    whole.generation_config.save_pretrained(folder)
    # The conversions of `save_pretrained` before it writes; a call of it would import DeepSpeed,
    # which takes a second and changes the process permanently.
    state = remove_tied_weights_from_state_dict(whole.state_dict(), whole)
    if not revert_weight_conversion(whole, state):
        raise ValueError("it would have no weights")


def _empty_copy(model: "PeftModel") -> "PeftModel":
    """Rebuild base and adapters without weights; `merge` does the same with weights."""
    with torch.device("meta"):
        plain = _empty(cast("PreTrainedModel", model.get_base_model()))
        empty = adapt(plain, copy.deepcopy(model.peft_config["default"]))
    is_quantised = hasattr(base_of(model).config, "quantization_config")
    for name, tensor in chain(empty.named_parameters(), empty.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        trained: Any = getattr(model.get_submodule(owner), leaf)
        if not is_quantised and trained.shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(trained.shape)} in the trained model, and "
                f"{tuple(tensor.shape)} in a model built from its configuration"
            )
    return empty


def _empty(base: "PreTrainedModel") -> "PreTrainedModel":
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=True):
        return rebuilt(base, base.dtype).to("meta")


def _failure_message(kind: str, base: Any, config: TrainConfig, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    what = "the adapter" if kind == "adapter" else "the whole model"
    advice = "export with spec.output.format adapter, or train another base model"
    if kind == "adapter" or config.method.type == "full":
        advice = "correct spec.model, or train another base model"
    return (
        f"spec.output.format {config.output.format}: {what} of {type(base).__name__} could not be "
        f"exported after the training ({reason}); {advice}"
    )

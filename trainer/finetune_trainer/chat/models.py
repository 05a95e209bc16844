"""Load the base model and the exported one for `ftctl chat`, with the settings of their run.

`__main__` calls it. An adapter shares the weights of its base: the base responds while the adapter
is disabled.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune_trainer.chat.placement import (
    Place,
    Weights,
    choose_place,
    free_gpu_memory,
    free_memory,
)
from finetune_trainer.chat.screen import note
from finetune_trainer.chat.settings import RunSettings
from finetune_trainer.config import ChatConfig, ModelConfig
from finetune_trainer.export.end_tokens import own_end_ids, with_stops
from finetune_trainer.export.settings import GENERATION_CONFIG
from finetune_trainer.model.adapters import ADAPTER_CONFIG, load_adapter
from finetune_trainer.model.folder_advice import explained
from finetune_trainer.model.load import add_rows, load_model, load_tokenizer
from finetune_trainer.model.loss import base_of
from finetune_trainer.model.weight_files import weight_files_in
from finetune_trainer.refusals import Refusals

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_STRICT = Refusals(is_new=True, warn=lambda _: None)


@dataclass(frozen=True)
class Voice:
    """A model that responds.

    Attributes:
        name: base or trained.
        model: Model of transformers or peft; both voices of an adapter share it.
        active: Returns the context in which the model has the weights of this voice.
        context: Largest number of tokens of a conversation; None if unlimited.
        ends: Tokens that end a response.
        is_precise_on_cpu: Whether a CPU computes in at least 32 bits.
    """

    name: str
    model: torch.nn.Module
    active: Callable[[], AbstractContextManager[Any]]
    context: int | None
    ends: Collection[int]
    is_precise_on_cpu: bool = False


@dataclass(frozen=True)
class Models:
    """The voices in the order of their responses, and their tokenizer.

    Attributes:
        stops: End tokens of the export, in addition to the end tokens of each model.
    """

    voices: Sequence[Voice]
    tokenizer: "PreTrainedTokenizerBase"
    stops: Sequence[int]


def load(config: ChatConfig, run: RunSettings) -> Models:
    """Load the models that respond, with the tokenizer of the export.

    Raises:
        ConfigError: a model cannot be loaded, or does not fit into memory.
    """
    folder = Path(config.trained)
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    names = [config.only] if config.only else ["base", "trained"]
    needed: dict[str, ModelConfig] = {}
    if config.base is not None and (is_adapter or "base" in names):
        needed["base"] = config.base
    if not is_adapter and "trained" in names:
        needed["trained"] = ModelConfig(path=str(folder))
    names = [name for name in names if is_adapter or name in needed]
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    place = _place(needed, run)
    loaded = {name: _load(model, run.of(name), place) for name, model in needed.items()}
    stops = _stops_of(folder, tokenizer)
    if "base" in loaded:
        _add_token_rows(loaded["base"], tokenizer, run, folder)
    if not is_adapter or names == ["base"]:
        voices = [_voice(name, loaded[name], stops, nullcontext) for name in names]
    else:
        adapted = load_adapter(loaded["base"], folder)
        active = {"base": adapted.disable_adapter, "trained": nullcontext}
        voices = [_voice(name, adapted, stops, active[name]) for name in names]
    return Models(voices, tokenizer, stops)


def _place(needed: Mapping[str, ModelConfig], run: RunSettings) -> Place:
    """Choose the place of the models that are on this machine; note a lower precision."""
    gpu = free_gpu_memory()
    with explained("the header of the weights"):
        weights = [
            Weights(weight_files_in(Path(model.path)), run.of(name).method.quantization)
            for name, model in needed.items()
        ]
        place = choose_place(weights, run.precision, gpu_bytes=gpu, host_bytes=free_memory())
    if place.device == "cpu" and gpu is not None:
        note("the weights do not fit into the GPU's memory, so the CPU computes")
    if place.precision != (run.precision or ("bf16" if place.device == "cuda" else "fp32")):
        note(
            f"memory is short, so the weights are {place.precision}; responses may differ from the "
            "samples of the run"
        )
    return place


def _load(model: ModelConfig, run: RunSettings, place: Place) -> "PreTrainedModel":
    config = run.train_config(model, place.precision)
    return load_model(config, torch.device(place.device), _STRICT)


def _add_token_rows(
    base: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", run: RunSettings, folder: Path
) -> None:
    """Add the same rows for new tokens as the run to the base."""
    tokens = {*tokenizer.convert_tokens_to_ids(list(run.add_tokens))}
    if (folder / ADAPTER_CONFIG).is_file():
        adapter = json.loads((folder / ADAPTER_CONFIG).read_text())
        rows = adapter.get("trainable_token_indices") or {}
        for layer in rows.values() if isinstance(rows, dict) else [rows]:
            tokens |= {*layer}
    if tokens:
        add_rows(base, sorted(tokens))


def _stops_of(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the end tokens of an export; release 0.1.0 recorded only the tokenizer's own."""
    path = folder / GENERATION_CONFIG
    ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if ids is None:
        ids = tokenizer.eos_token_id
    return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]


def _voice(
    name: str,
    model: torch.nn.Module,
    stops: Sequence[int],
    active: Callable[[], AbstractContextManager[Any]],
) -> Voice:
    base, weight = base_of(model), next(model.parameters())
    ends = with_stops(own_end_ids(model), stops)
    is_quantised = hasattr(base.config, "quantization_config")
    return Voice(
        name,
        model,
        active,
        context=getattr(base.config.get_text_config(), "max_position_embeddings", None),
        ends=ends if isinstance(ends, list) else [] if ends is None else [ends],
        is_precise_on_cpu=weight.is_cpu and weight.element_size() >= 4 and not is_quantised,
    )

"""Find the tensors of a base model that the trained class does not read.

transformers ignores such tensors, mostly without a warning: heads for the prediction of several
tokens, the vision tower of a model that is trained as a language model, and the layers beyond those
in `config.json`. `rank` refuses the last; `export` copies the others.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_trainer.config import ModelConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.identity import weight_files
from finetune_trainer.model.load import load_settings, without_weights
from finetune_trainer.model.stored_quantization import stored_kind
from finetune_trainer.refusals import Refusals

_COMPUTED = re.compile(r"(inv_freq|position_ids|attn\.(masked_)?bias|attention\.(masked_)?bias)$")
"""Names of buffers that earlier versions of transformers saved and every version computes."""
_OF_NEXT_TOKEN = ("eh_proj", "enorm", "hnorm")
"""Parts of a layer that predicts a further token, in DeepSeek-V3, GLM-4.5 and their descendants."""
_OF_QUANTISED = re.compile(
    r"(?P<layer>.+)\.(SCB|weight_format|input_scale|activation_scale|scale|qscale_weight)$|"
    r"(?P<weight>.+?)(_blocks|_scales|_scale_inv|_scale|\.(absmax|quant_map|nested_absmax|"
    r"nested_quant_map|quant_state\..+))$"
)
"""Names beside a quantised weight, or beside the weight of a layer."""
_PLAIN = ("BF16", "F16", "F32", "F64")
_MOST_NAMED = 3


@dataclass(frozen=True)
class Unread:
    """Tensors in the files of a base model that its class does not read.

    Attributes:
        reader: Class of the model.
        prefix: Prefix that the names of some bases have, and the class's own names lack.
        names: All tensors in the files of the base.
        extra: Tensors outside of the class, with their files.
        modules: Number of tensors in each outermost module without a read tensor, of `extra`.
        layers: Number of decoder layers by `config.json`.
        layers_field: Field of `config.json` with that number.
        beyond: Names of decoder layers that the files have beyond them.
        is_quantised: Whether `extra` has quantised tensors, so it cannot be copied.
    """

    reader: str
    prefix: str
    names: frozenset[str]
    extra: Mapping[str, Path]
    modules: Mapping[str, int]
    layers: int
    layers_field: str
    beyond: tuple[str, ...] = field(default=())
    is_quantised: bool = False

    @property
    def description(self) -> str:
        """The modules of `extra` for messages."""
        listed = [f"{name} ({count} tensors)" for name, count in self.modules.items()]
        more = len(listed) - _MOST_NAMED
        return ", ".join(listed[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

    def notes(self, is_whole: bool) -> list[str]:
        """Return notes for users of an exported model or adapter."""
        if not self.extra:
            return []
        what = "copied unchanged from the base" if is_whole else "not part of the adapter"
        if is_whole and self.is_quantised:
            what = "left out, because they are quantised in the files of the base"
        return [
            f"{self.reader}, the class that was trained, does not read {self.description}; "
            f"these weights were not trained and are {what}"
        ]


def unread_tensors(config: ModelConfig) -> Unread:
    """Compare the files of a model that has been loaded with the class that reads them.

    Raises:
        ConfigError: `config.json` cannot be read.
    """
    settings = load_settings(config)
    model: Any = without_weights(settings)
    files = {name: file for file in weight_files(config) for name in _names_in(file)}
    own_names, state = _own_names(files, model), model.state_dict()
    read = {name for name in files if own_names[name] in state}
    is_quantised = stored_kind(settings) is not None
    unread = {
        name: own_names[name]
        for name in files
        if name not in read and not _COMPUTED.search(name)
        if not (is_quantised and _is_beside(name, own_names, state))
    }
    beyond = _layers_beyond(unread, model)
    cut = {name for names in beyond.values() for name in names}
    extra = {name: files[name] for name in unread if name not in cut}
    return Unread(
        reader=type(model).__name__,
        prefix=model.base_model_prefix,
        names=frozenset(files),
        extra=extra,
        modules=_outermost(extra, read | cut),
        layers=max(_layer_lists(model).values(), default=0),
        layers_field=settings.attribute_map.get("num_hidden_layers", "num_hidden_layers"),
        beyond=tuple(beyond),
        is_quantised=is_quantised and not _are_plain(extra),
    )


def _is_beside(name: str, own_names: Mapping[str, str], state: Mapping[str, Any]) -> bool:
    """Whether a stored tensor belongs to the quantised form of a weight that the class reads."""
    found = _OF_QUANTISED.match(name)
    if found is None:
        return False
    weight = found["weight"] or f"{found['layer']}.weight"
    return own_names.get(weight, weight) in state


def check_unread(unread: Unread, path: str, refusals: Refusals) -> None:
    """Refuse a model with fewer layers than its files; name the other tensors in a warning.

    Raises:
        ConfigError: the run is new, and `config.json` has fewer layers.
    """
    if unread.beyond:
        first, *more = unread.beyond
        and_more = f" and {len(more)} more" if more else ""
        refusals.refuse(
            ConfigError(
                f"spec.model.source: the config.json of {path} has {unread.layers} layers, and its "
                f"files have others ({first}{and_more}), without which the model is cut; correct "
                f"{unread.layers_field} in config.json, or delete these layers from the files"
            )
        )
    if unread.extra:
        end = "without them" if unread.is_quantised else "with them unchanged"
        refusals.warn(
            f"the files of {path} contain {unread.description}, which {unread.reader} does not "
            f"read; they are not trained, and a whole model is exported {end}"
        )


def _names_in(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _are_plain(tensors: Mapping[str, Path]) -> bool:
    from safetensors import safe_open

    for name, file in tensors.items():
        with safe_open(file, framework="pt") as opened:
            if opened.get_slice(name).get_dtype() not in _PLAIN:
                return False
    return True


def _own_names(names: Iterable[str], model: Any) -> dict[str, str]:
    """Return the name in the model of each stored tensor, as transformers derives it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    found = {}
    for name in names:
        own, _ = rename_source_key(name, renamings, converters, prefix, state)
        found[name] = name if own not in state and name in state else own
    return found


def _layers_beyond(unread: Mapping[str, str], model: Any) -> dict[str, list[str]]:
    """Return the stored names by layer, for layers of the decoder that the model does not have.

    A layer that predicts a further token is none of them.
    """
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    found: dict[str, list[str]] = {}
    others: set[str] = set()
    for path, length in _layer_lists(model).items():
        prefix = re.escape(f"{model.base_model_prefix}.")
        short = re.escape(path.removeprefix(f"{model.base_model_prefix}."))
        where = re.compile(rf"(?:{prefix})?(?:{re.escape(path)}|{short})\.(\d+)\.")
        for name, own in unread.items():
            place = where.match(own)
            if place is None or int(place[1]) < length:
                continue
            layer = place[0].removesuffix(".")
            found.setdefault(layer, []).append(name)
            is_ignored = any(pattern.search(own) for pattern in ignored)
            if is_ignored or own[place.end() :].startswith(_OF_NEXT_TOKEN):
                others.add(layer)
    return {layer: names for layer, names in found.items() if layer not in others}


def _layer_lists(model: Any) -> dict[str, int]:
    """Return the names and lengths of the outermost lists of layers in the language model."""
    from torch import nn

    found: dict[str, int] = {}
    for part in (model.get_decoder(), model):  # a vision tower of the whole model has layers, too
        inside = {id(module) for module in part.modules()} if part is not None else set()
        for name, module in model.named_modules():
            is_list = isinstance(module, nn.ModuleList) and len(module) > 0 and id(module) in inside
            if is_list and not any(name.startswith(f"{outer}.") for outer in found):
                found[name] = len(module)
        if found:
            break
    return found


def _outermost(names: Iterable[str], others: Iterable[str]) -> dict[str, int]:
    """Return the outermost modules that contain `names` and none of `others`, with their counts."""
    shared: set[str] = set()
    for other in others:
        parts = other.split(".")
        shared |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        counts[next(path for path in paths if path not in shared)] += 1
    return dict(counts)

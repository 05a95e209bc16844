"""Complete the `config.json` and the `generation_config.json` of an exported model.

`beside` calls it for files that transformers has saved. Servers and earlier versions of
transformers read keys that the current version drops or renames.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_trainer.export.end_tokens import Ids

GENERATION_CONFIG = "generation_config.json"
_FLAT_ROPE = ("gemma3_text", "olmo3")
"""Families with nested rotary parameters that read the flat form, too."""
_OF_THE_RUN = (
    "_name_or_path",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)
"""Keys whose values belong to the exported weights, not to the base."""


def complete_config(path: Path, base: Mapping[str, Any]) -> None:
    """Write each key that the base's `config.json` has and the exported file at `path` lacks.

    A model of another type than the base, such as the text part of a larger model, gets the keys
    of the part with its type. The keys of rotary embeddings that earlier versions of transformers
    read are added in any case.
    """
    saved = json.loads(path.read_text())
    parts = [base, *(part for part in base.values() if isinstance(part, dict))]
    same = (part for part in parts if part.get("model_type") == saved.get("model_type"))
    _add_missing(saved, next(same, {}))
    _add_earlier_names(saved)
    path.write_text(json.dumps(saved, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def set_end_tokens(path: Path, ids: Ids) -> None:
    """Write the tokens at which generation stops; an adapter gets a file with these alone."""
    settings = json.loads(path.read_text()) if path.is_file() else {}
    settings["eos_token_id"] = ids
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _add_missing(saved: dict[str, Any], base: Mapping[str, Any]) -> None:
    for key, value in base.items():
        known = saved.get(key)
        if key.endswith("_config") and isinstance(value, dict) and isinstance(known, dict):
            _add_missing(known, value)
        elif key not in saved and key not in _OF_THE_RUN:
            saved[key] = value
    if "torch_dtype" in base and "dtype" in saved:
        saved.setdefault("torch_dtype", saved["dtype"])


def _add_earlier_names(saved: dict[str, Any]) -> None:
    """Write `rope_parameters` of transformers 5 under the names of transformers 4, too."""
    for part in saved.values():
        if isinstance(part, dict) and isinstance(part.get("rope_parameters"), dict):
            _add_earlier_names(part)
    rope = saved.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    local = rope.get("sliding_attention")
    if isinstance(local, dict) and "rope_theta" in local:
        saved.setdefault("rope_local_base_freq", local["rope_theta"])
    is_nested = "full_attention" in rope
    rope = rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        return
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    factor = scaling.pop("partial_rotary_factor", None)
    is_neox = str(saved.get("model_type")).startswith("gpt_neox")
    saved.setdefault("rotary_emb_base" if is_neox else "rope_theta", rope["rope_theta"])
    if is_nested and saved.get("model_type") not in _FLAT_ROPE:
        return  # transformers 5 would read further flat names instead of the nested parameters
    if factor is not None:
        saved.setdefault("rotary_pct" if is_neox else "partial_rotary_factor", factor)
    if scaling not in ({}, {"rope_type": "default"}):
        saved.setdefault("rope_scaling", scaling)

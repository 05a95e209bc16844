"""Find the shape of a known model in models.json, which operator/models generates.

Planner, `ftctl plan` and `init` call it for models that they cannot read, such as gated ones.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from finetune_operator.api.v1alpha1.inputs import ModelSpec
from finetune_operator.planner.uris import HUB
from finetune_trainer.sizing.base_shape import BaseShape


def base_shape_of_job(model: ModelSpec) -> BaseShape | None:
    """Return the shape of a job's model, found by its source or else its base name."""
    by_source = base_shape_of(model.source)
    return by_source or (base_shape_of(model.base_name) if model.base_name else None)


def base_shape_of(name: str) -> BaseShape | None:
    """Return the shape of a model; None if it is unknown.

    Args:
        name: Name on the hub, with or without `hf://`. The case of letters is ignored.
    """
    shape = _shapes().get(name.removeprefix(HUB).lower())
    return None if shape is None else BaseShape.model_validate(shape)


@cache
def _shapes() -> dict[str, Any]:
    """Read the file once; shapes are by name in lower case."""
    models = json.loads(files(__package__).joinpath("models.json").read_bytes())
    return {name.lower(): one["shape"] for one in models for name in one["names"]}

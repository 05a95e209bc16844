"""Check that the files of a base model contain every weight in the configured shape.

transformers initialises a missing weight with random values and only logs a warning. A run on such
a base trains and exports without an error, but its model is broken.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from finetune_trainer.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_NAMED = 3


def refuse_random_weights(model: "PreTrainedModel", found: Mapping[str, Any], path: str) -> None:
    """Refuse a model with a parameter that its files do not contain.

    Tied weights count once, and tensors that a family computes are not parameters.

    Args:
        model: Loaded model.
        found: Loading info of `from_pretrained`.
        path: Folder, or name on the hub.

    Raises:
        ConfigError: a weight is missing, or has another shape.
    """
    weights = [name for name, _ in model.named_parameters()]
    other = [
        f"{name} is {_shape(stored)}, and {_shape(wanted)} by config.json"
        for name, stored, wanted in sorted(found["mismatched_keys"])
    ]
    if other:
        raise ConfigError(
            f"spec.model.source: the files of {path} do not match its config.json "
            f"({_named(other, '; ')}); take both from one model"
        )
    absent = set(found["missing_keys"])
    missing = [name for name in weights if name in absent]
    if missing:
        raise ConfigError(
            f"spec.model.source: the files of {path} lack {len(missing)} of the model's "
            f"{len(weights)} weights ({_named(missing)}), which would be random; copy them "
            "again, or use a complete model, with its language model head"
        )


def _named(names: Iterable[str], between: str = ", ") -> str:
    listed = list(names)
    more = len(listed) - _MOST_NAMED
    return between.join(listed[:_MOST_NAMED]) + (f"{between}{more} more" if more > 0 else "")


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes)) or "a number"

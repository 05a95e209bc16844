"""Whether the files of a base model hold each of its weights, in the shape of its configuration.

transformers gives a weight that no file holds random values, and says so in a warning. A run over
such a base learns, exports and looks well, and its model is broken.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from finetune_trainer.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_NAMED = 3


def refuse_random_weights(model: "PreTrainedModel", found: Mapping[str, Any], path: str) -> None:
    """Refuse a model with a parameter whose values are of no file.

    Weights that share another's values are no parameters of their own here, and what a family
    computes by itself is no parameter.

    Args:
        model: As it was loaded.
        found: What `from_pretrained` tells with `output_loading_info`.
        path: The folder, or the name on the hub.

    Raises:
        ConfigError: a weight is missing, or has another shape.
    """
    weights = [name for name, _ in model.named_parameters()]
    other = [
        f"{name} is {_shape(there)}, and {_shape(wanted)} by config.json"
        for name, there, wanted in sorted(found["mismatched_keys"])
    ]
    if other:
        raise ConfigError(
            f"spec.model.source: the files of {path} are not those of its config.json "
            f"({_named(other, '; ')}); take both from one model"
        )
    absent = set(found["missing_keys"])
    missing = [name for name in weights if name in absent]
    if missing:
        raise ConfigError(
            f"spec.model.source: the files of {path} lack {len(missing)} of the model's "
            f"{len(weights)} weights ({_named(missing)}), which would be random; copy them anew, "
            "or name a model that was saved whole, with its language model head"
        )


def _named(names: Iterable[str], between: str = ", ") -> str:
    listed = list(names)
    more = len(listed) - _MOST_NAMED
    return between.join(listed[:_MOST_NAMED]) + (f"{between}{more} more" if more > 0 else "")


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes)) or "a number"

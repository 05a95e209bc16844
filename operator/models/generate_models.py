"""Generate the base shapes of models that the operator ships, from configurations.json.

    python operator/models/generate_models.py           write models.json (make models)
    python operator/models/generate_models.py --check   exit 1 if it is out of date

Each model is built on the meta device, which takes minutes for all. A model with another number of
parameters than the published one is refused. The number does not reveal wrong numbers of heads, so
an entry names the sources of its widths.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from finetune_trainer.sizing.base_shape import BaseShape

SOURCE = Path(__file__).with_name("configurations.json")
TARGET = Path(__file__).parents[1] / "finetune_operator" / "planner" / "models.json"


class KnownModel(BaseModel):
    """An entry of configurations.json.

    Attributes:
        names: Names on the hub of all checkpoints with this shape.
        parameters: Published number of parameters.
        counted_by: Source of `parameters`, a key of `sources`.
        widths_from: Sources of the configuration, keys of `sources`.
        configuration: Keys of config.json that shapes depend on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...]
    parameters: int
    counted_by: str
    widths_from: tuple[str, ...]
    configuration: dict[str, Any]


class Configurations(BaseModel):
    """Content of configurations.json: models, and their sources by key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sources: dict[str, str]
    models: tuple[KnownModel, ...]


def known_models() -> Configurations:
    """Read configurations.json."""
    return Configurations.model_validate_json(SOURCE.read_bytes())


def shape_of(known: KnownModel) -> BaseShape:
    """Build a model on the meta device, and return its shape.

    Raises:
        ValueError: the number of parameters is not the published one.
    """
    import torch
    from transformers import AutoConfig

    from finetune_trainer.memory.read_base import read_base
    from finetune_trainer.model.load import without_weights

    settings = AutoConfig.for_model(**known.configuration)
    base = read_base(without_weights(settings, torch.bfloat16).train())
    count = sum(math.prod(tensor.shape) for _, tensor in base.tensors())
    if count != known.parameters:
        raise ValueError(
            f"{known.names[0]} has {count:,} parameters, published are {known.parameters:,}; "
            "correct its configuration"
        )
    return base


def line_of(known: KnownModel) -> str:
    """Return the line of models.json, raising as `shape_of`."""
    shape = shape_of(known).model_dump(mode="json", exclude_defaults=True)
    return json.dumps({"names": known.names, "shape": shape}, separators=(",", ":"))


def main() -> int:
    """Write the file, or with `--check` compare it; return the exit code."""
    text = "[\n" + ",\n".join(map(line_of, known_models().models)) + "\n]\n"
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in sys.argv[1:]:
        print("operator/finetune_operator/planner/models.json is out of date; run: make models")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Shapes of models.json equal the models that the trainer builds from the same configurations."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from finetune_operator.planner.models import base_shape_of
from finetune_trainer.sizing.method import with_method
from generate_models import TARGET, KnownModel, known_models, line_of, shape_of
from support.launch.launches import train_config
from support.memory.parameters import of_model, of_shape
from support.model import grids

METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": {"type": "full"}},
    "LoRA": {"method": {"type": "lora", "lora": {"r": 16}}},
    "QLoRA": {"method": {"type": "qlora", "lora": {"r": 16}, "quantization": "nf4"}},
}
# Plain, fused, transposed and stacked weights, and a vision tower; `make grids` tests all models.
SAMPLE = (
    "meta-llama/Llama-3.2-1B",
    "EleutherAI/pythia-70m",
    "openai-community/gpt2",
    "openai/gpt-oss-20b",
    "google/gemma-3-4b-pt",
)
MODELS = [one for one in known_models().models if grids.IS_WHOLE or one.names[0] in SAMPLE]


@pytest.mark.parametrize("known", [pytest.param(one, id=one.names[0]) for one in MODELS])
def test_a_shipped_shape_equals_the_adapted_model(known: KnownModel, tmp_path: Path) -> None:
    base = base_shape_of(known.names[0])
    assert base is not None
    for name, changes in METHODS.items():
        config = train_config(tmp_path, training={"precision": "bf16"}, **changes)
        settings = AutoConfig.for_model(**known.configuration)
        assert of_shape(with_method(base, config)) == of_model(settings, config), name


def test_shipped_shapes_are_generated() -> None:
    lines = TARGET.read_text(encoding="utf-8").splitlines()
    for known in MODELS:
        assert line_of(known) in (line.removesuffix(",") for line in lines)


def test_a_model_with_another_number_of_parameters_is_refused() -> None:
    known = MODELS[0]
    other = known.model_copy(update={"parameters": known.parameters + 1})
    with pytest.raises(ValueError, match=r"has [\d,]+ parameters, published are [\d,]+; correct"):
        shape_of(other)

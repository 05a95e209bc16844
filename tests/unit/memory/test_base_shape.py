"""The shape of a model with a method equals the model that the trainer builds."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.memory.read_base import read_base
from finetune_trainer.model.load import without_weights
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.method import with_method
from support.launch.launches import train_config
from support.memory.parameters import of_model, of_shape
from support.model.every_family import NAMES, REFUSED, tiny_settings

METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": {"type": "full"}, "output": {"format": "merged"}},
    "full in 8 bits": {
        "method": {"type": "full"},
        "output": {"format": "merged"},
        "training": {"precision": "bf16", "optimizer": "adamw8bit"},
    },
    "LoRA": {"method": {"type": "lora", "lora": {"r": 3}}},
    "LoRA in fp32": {
        "method": {"type": "lora", "lora": {"r": 3}},
        "training": {"precision": "fp32"},
    },
    "DoRA": {"method": {"type": "lora", "lora": {"r": 3, "dora": True}}},
    "named modules": {"method": {"type": "lora", "lora": {"r": 3, "target_modules": ["q_proj"]}}},
    "the head": {"method": {"type": "lora", "lora": {"r": 3, "target_modules": ["lm_head"]}}},
}
SHARES_ADAPTED_LAYERS = "zamba"
"""Family that uses an adapted layer at several depths, which the formula counts several times."""


def config_of(folder: Path, method: str) -> TrainConfig:
    values = {"training": {"precision": "bf16"}, **METHODS[method]}
    return train_config(folder, **values)


def read(settings: Any) -> BaseShape:
    return read_base(without_weights(settings, torch.bfloat16).train())


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *product(("llama", "gpt2", "phi3", "mixtral"), ("full", "LoRA")),
        ("qwen3", "full in 8 bits"),
        ("qwen3", "LoRA in fp32"),
        ("qwen3", "named modules"),
        ("gemma3_text", "DoRA"),
        ("llama", "the head"),
    ],
)
def test_a_shape_equals_the_model(name: str, method: str, tmp_path: Path) -> None:
    settings, config = tiny_settings(name), config_of(tmp_path, method)
    assert of_shape(with_method(read(settings), config)) == of_model(settings, config)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:target_parameters=:RuntimeWarning")  # beam without experts
@pytest.mark.parametrize("name", [one for one in NAMES if one not in REFUSED])
def test_the_shape_of_each_family_equals_the_model(name: str, tmp_path: Path) -> None:
    settings = tiny_settings(name)
    base = read(settings)
    full, lora = (config_of(tmp_path, method) for method in ("full", "LoRA"))
    assert of_shape(with_method(base, full)) == of_model(settings, full)
    if not any(tensor.lora_factor for _, tensor in base.tensors()):
        with pytest.raises(ConfigError, match="cannot be adapted"):
            of_model(settings, lora)
    elif name != SHARES_ADAPTED_LAYERS:
        assert of_shape(with_method(base, lora)) == of_model(settings, lora)


def test_a_shape_survives_json() -> None:
    base = read(tiny_settings("mixtral"))
    assert BaseShape.model_validate_json(base.model_dump_json(exclude_defaults=True)) == base


def test_frozen_layers_are_a_kind_of_their_own(tmp_path: Path) -> None:
    base = read(tiny_settings("llama"))
    method = {"type": "full", "freeze": ["model.layers.0.*", "model.embed_tokens.*"]}
    shape = with_method(base, train_config(tmp_path, method=method, output={"format": "merged"}))
    assert shape.order == (0, 1)
    frozen, trained = shape.kinds
    assert not any(weight.is_trained for weight in frozen.weights)
    assert all(weight.is_trained for weight in trained.weights)
    assert [weight.is_trained for weight in shape.embedding] == [False]


def test_added_tokens_train_rows_of_embedding_and_head(tmp_path: Path) -> None:
    base = read(tiny_settings("llama"))
    model = {"path": str(tmp_path / "model"), "add_tokens": ["<a>", "<b>"]}
    shape = with_method(base, train_config(tmp_path, model=model, **METHODS["LoRA"]))
    trained = [weight for weight in shape.others if weight.is_trained]
    assert not base.is_tied
    assert [(weight.count, weight.rows) for weight in trained] == [(2 * base.hidden, 2)] * 2
    assert trained == [shape.embedding[-1], shape.head[-1]]

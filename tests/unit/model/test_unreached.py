"""Weights that no text reaches are not trained and get no adapters."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune_trainer.config import LoraSettings, ModelConfig
from finetune_trainer.model.adapters import attach_lora, choose_trained
from finetune_trainer.model.unreached import named, unreached_modules
from support.launch.launches import train_config
from support.model.every_family import tiny_settings, write_settings

ROW = 32


def modules_of(family: str, folder: Path, row_tokens: int = ROW) -> list[str]:
    write_settings(tiny_settings(family), folder)
    return unreached_modules(ModelConfig(path=str(folder)), row_tokens, pytest.fail)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "qwen3_moe", "mamba", "dbrx"])
def test_text_reaches_all_weights_of_a_text_model(family: str, tmp_path: Path) -> None:
    assert modules_of(family, tmp_path) == []


@pytest.mark.parametrize(
    ("family", "tower"),
    [
        ("gemma3", "model.vision_tower, model.multi_modal_projector"),
        ("gemma4", "model.vision_tower"),
        ("got_ocr2", "model.vision_tower"),
        ("fuyu", "model.vision_embed_tokens"),
        ("deepseek_v32", "model.layers.0.self_attn.indexer, model.layers.1.self_attn.indexer"),
    ],
)
def test_towers_and_indexers_are_named(family: str, tower: str, tmp_path: Path) -> None:
    modules = modules_of(family, tmp_path)
    model = AutoModelForCausalLM.from_config(tiny_settings(family))
    assert tower in named(modules, model)


def test_modules_that_only_a_long_row_reaches_are_trained(tmp_path: Path) -> None:
    assert modules_of("deepseek_v4", tmp_path, row_tokens=512) == []
    compressor = "model.layers.0.self_attn.compressor.gate_proj"
    assert compressor in modules_of("deepseek_v4", tmp_path, row_tokens=16)


@pytest.mark.parametrize("family", ["gemma3", "got_ocr2", "deepseek_v32"])
def test_the_weights_without_a_gradient_are_frozen(family: str, tmp_path: Path) -> None:
    modules = modules_of(family, tmp_path)
    model = AutoModelForCausalLM.from_config(tiny_settings(family))
    config = train_config(tmp_path, method={"type": "full"})
    choose_trained(model, config, unreached=modules)
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad), name


def adapted(model: PeftModel) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")], ids=["all linear", "named"])
def test_a_tower_gets_no_adapters(targets: tuple[str, ...], tmp_path: Path) -> None:
    modules = modules_of("gemma3", tmp_path)
    settings = LoraSettings(r=2, target_modules=targets)
    before, now = (
        adapted(
            attach_lora(
                AutoModelForCausalLM.from_config(tiny_settings("gemma3")), settings, (), excluded
            )
        )
        for excluded in ((), modules)
    )
    assert any("vision_tower" in name for name in before)
    assert now == {name for name in before if "language_model" in name}


def test_a_model_that_cannot_be_computed_is_trained_as_a_whole(tmp_path: Path) -> None:
    write_settings(tiny_settings("llama"), tmp_path)
    path = tmp_path / "config.json"
    heads = {"num_attention_heads": 4, "num_key_value_heads": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | heads))
    warnings: list[str] = []
    assert unreached_modules(ModelConfig(path=str(tmp_path)), ROW, warnings.append) == []
    [warning] = warnings
    assert warning.startswith("whether text reaches all weights of the model is not known (")

"""Tensors that the trained class does not read are in the exported model, under their names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
)

from finetune_trainer.config import ModelConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.export import export
from finetune_trainer.model.load import load_settings, load_tokenizer
from finetune_trainer.model.stored_quantization import resolve_stored_quantization
from finetune_trainer.model.unread import check_unread, unread_tensors
from finetune_trainer.refusals import STRICT, Refusals
from support.checkpoint.export_fixtures import PROGRESS, export_config, output_fence, trained_model
from support.data.text_fixtures import VOCAB_SIZE, tiny_tokenizer
from support.model.every_family import tiny_settings
from support.model.quantized_files import write_fp8

NO_WARNINGS = Refusals(is_new=True, warn=pytest.fail)


def base_of(family: str, folder: Path, *, sees: bool = False, **changes: Any) -> Path:
    """Write a random model with a tokenizer and return its folder."""
    settings = tiny_settings(family)
    part = settings.get_text_config()
    part.vocab_size = VOCAB_SIZE
    for name, value in changes.items():
        setattr(part, name, value)
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    auto.from_config(settings).save_pretrained(folder)
    tiny_tokenizer(folder).save_pretrained(folder)
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a model, read as its index names them."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(folder / "model.safetensors")
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    found = {}
    for name, file in places.items():
        with safe_open(folder / file, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def exported(base: Path, output: Path, **changes: Any) -> Path:
    """Export a model of `base` after a change of all its weights."""
    config = export_config(base, output, method="full", format="merged", **changes)
    model = trained_model(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    model.config.dtype = torch.float32
    fence = output_fence(config)
    tokenizer = load_tokenizer(config.model)
    [folder] = export(
        model, tokenizer, config, fence=fence, progress=PROGRESS, warn=print, max_shard_bytes=50_000
    )
    return Path(folder)


def add(base: Path, **tensors: Tensor) -> None:
    """Add tensors, named with `__` for dots, to the file of a model."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    file = base / "model.safetensors"
    save_file(load_file(file) | named, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "llama4"])
def test_a_vision_tower_is_copied_and_the_architecture_stays(family: str, tmp_path: Path) -> None:
    base = base_of(family, tmp_path / "base", sees=True)
    (base / "preprocessor_config.json").write_text("{}")
    folder = exported(base, tmp_path / "output")
    before, after = stored(base), stored(folder)
    assert after.keys() == before.keys()
    seen = [name for name in before if "vis" in name or "projector" in name]
    assert len(seen) > 30
    assert all(torch.equal(after[name], before[name]) for name in seen)
    learned = [name for name in before if name not in seen]
    assert all(torch.equal(after[name], before[name] * 1.5) for name in learned)
    settings = [json.loads((one / "config.json").read_text()) for one in (base, folder)]
    assert settings[0]["architectures"] == settings[1]["architectures"]
    whole, found = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(whole).__name__ == settings[0]["architectures"][0]
    assert not any(found.values())
    assert (folder / "preprocessor_config.json").is_file()
    assert "copied unchanged from the base" in (folder / "README.md").read_text()


@pytest.mark.parametrize("family", ["qwen3_5", "llama4", "gemma4"])
def test_a_base_with_a_tower_is_exported_in_its_dtype(family: str, tmp_path: Path) -> None:
    changes = {"vocab_size_per_layer_input": VOCAB_SIZE} if family == "gemma4" else {}
    base = base_of(family, tmp_path / "base", sees=True, **changes)
    file = base / "model.safetensors"
    narrow = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(narrow, file, metadata={"format": "pt"})
    after = stored(exported(base, tmp_path / "output"))
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


def quantise(base: Path, kind: str) -> None:
    """Quantise a model with a tower as it is published: fp8 without the tower, nf4 with it."""
    if kind == "fp8":
        write_fp8(base, plain="visual")
        return
    stored = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForImageTextToText.from_pretrained(
        base, quantization_config=stored, device_map={"": "cpu"}
    ).save_pretrained(base)


@pytest.mark.parametrize(
    ("kind", "family"), [("fp8", "qwen3_5"), ("fp8", "qwen3_5_moe"), ("nf4", "qwen3_5")]
)
def test_a_quantised_base_with_a_tower_is_read_by_the_class_that_its_export_names(
    kind: str, family: str, tmp_path: Path
) -> None:
    base = base_of(family, tmp_path / "base", sees=True)
    names = stored(base).keys()
    quantise(base, kind)
    config = export_config(base, tmp_path / "output", format="merged")
    config = resolve_stored_quantization(config, load_settings(config.model), STRICT)
    model, tokenizer = trained_model(config), load_tokenizer(config.model)
    fence = output_fence(config)
    [folder] = export(model, tokenizer, config, fence=fence, progress=PROGRESS, warn=print)
    [written] = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    whole = AutoModelForImageTextToText if kind == "fp8" else AutoModelForCausalLM
    read, found = whole.from_pretrained(folder, output_loading_info=True)
    assert type(read).__name__ == written
    assert not any(found.values())
    if kind == "fp8":
        assert stored(Path(folder)).keys() == names


def test_the_head_for_further_tokens_is_copied(tmp_path: Path) -> None:
    base = base_of("llama", tmp_path / "base")
    add(base, mtp__fc__weight=torch.randn(4, 4).bfloat16(), mtp__norm__weight=torch.ones(4))
    before, after = stored(base), stored(exported(base, tmp_path / "output"))
    assert after.keys() == before.keys()
    for name in ("mtp.fc.weight", "mtp.norm.weight"):
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])
    warnings: list[str] = []
    unread = unread_tensors(ModelConfig(path=str(base)))
    check_unread(unread, str(base), Refusals(is_new=True, warn=warnings.append))
    assert "contain mtp (2 tensors), which LlamaForCausalLM does not read" in warnings[0]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_layer_for_further_tokens_is_no_layer_of_the_model(family: str, tmp_path: Path) -> None:
    base = base_of(family, tmp_path / "base")
    add(
        base,
        model__layers__2__eh_proj__weight=torch.randn(4, 8),
        model__layers__2__self_attn__o_proj__weight=torch.randn(4, 4),
    )
    unread = unread_tensors(ModelConfig(path=str(base)))
    assert unread.beyond == ()
    assert unread.modules == {"model.layers.2": 2}


def shorten(base: Path, layers: int, part: str | None = None, name: str = "") -> None:
    """Write another number of layers into a model's `config.json`."""
    path = base / "config.json"
    settings = json.loads(path.read_text())
    text = settings if part is None else settings[part]
    text[name or "num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    path.write_text(json.dumps(settings))


def without_prefix(base: Path) -> None:
    """Name tensors as the body of a model without its head is saved."""
    file = base / "model.safetensors"
    named = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    save_file(named, file, metadata={"format": "pt"})


def shorten_without_prefix(base: Path) -> None:
    without_prefix(base)
    shorten(base, 1, name="n_layer")


@pytest.mark.parametrize(
    ("family", "sees", "change", "layer"),
    [
        pytest.param("llama", False, lambda b: shorten(b, 1), "model.layers.1", id="llama"),
        pytest.param(
            "gpt2", False, lambda b: shorten(b, 1, name="n_layer"), "transformer.h.1", id="gpt2"
        ),
        pytest.param(
            "gpt2",
            False,
            shorten_without_prefix,
            "h.1",
            id="gpt2 without prefix",
        ),
        pytest.param(
            "deepseek_v3", False, lambda b: shorten(b, 1), "model.layers.1", id="deepseek_v3"
        ),
        pytest.param(
            "qwen3_5",
            True,
            lambda b: shorten(b, 1, part="text_config"),
            "model.layers.1",
            id="a part of qwen3_5",
        ),
        pytest.param(
            "mixtral", False, lambda b: shorten(b, 1), "model.layers.1", id="mixtral's experts"
        ),
        pytest.param(
            "openai-gpt",
            False,
            lambda b: shorten(b, 1, name="n_layer"),
            "transformer.h.1",
            id="openai-gpt",
        ),
        pytest.param(
            "gemma3",
            True,
            lambda b: shorten(b, 1, part="text_config"),
            "1",
            id="gemma3 with a tower",
        ),
    ],
)
def test_a_config_with_fewer_layers_than_the_files_is_refused(
    family: str, sees: bool, change: Callable[[Path], Any], layer: str, tmp_path: Path
) -> None:
    base = base_of(family, tmp_path / "base", sees=sees)
    check_unread(unread_tensors(ModelConfig(path=str(base))), str(base), Refusals(True, print))
    change(base)
    unread = unread_tensors(ModelConfig(path=str(base)))
    assert len(unread.beyond) == 1
    assert unread.beyond[0].endswith(layer)
    with pytest.raises(ConfigError, match=r"has 1 layers, and its files have others"):
        check_unread(unread, str(base), NO_WARNINGS)
    warnings: list[str] = []
    check_unread(unread, str(base), Refusals(is_new=False, warn=warnings.append))
    assert "a new run would be refused" in warnings[0]


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.attn.masked_bias"]
)
def test_buffers_of_earlier_versions_are_neither_named_nor_copied(
    name: str, tmp_path: Path
) -> None:
    base = base_of("llama", tmp_path / "base")
    add(base, **{name.replace(".", "__"): torch.ones(2)})
    check_unread(unread_tensors(ModelConfig(path=str(base))), str(base), NO_WARNINGS)

"""What is exported, of every method, loads elsewhere and answers as the trained model does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from finetune_trainer.config import TrainConfig
from finetune_trainer.export import export
from finetune_trainer.export.merge import probe_logits
from finetune_trainer.model.load import load_model, load_tokenizer
from finetune_trainer.model.quantize import full_weight
from support.checkpoint.export_fixtures import PROGRESS, output_fence, trained_model
from support.data.text_fixtures import tiny_model
from support.launch.launches import train_config

CPU = torch.device("cpu")
NEW = ("<|think|>", "<|/think|>")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("export")
    for name in ("model", "tied"):
        tiny_model(folder / name, tied=name == "tied")
    (folder / "train.jsonl").write_text('{"messages": []}\n')
    return folder


def settings(bases: Path, output: Path, form: str, **changes: Any) -> TrainConfig:
    """Return a configuration that exports; `changes` are sections of it."""
    values: dict[str, Any] = {
        "world": {"nproc_per_node": 1},
        "method": {"type": "lora", "lora": {"r": 4}},
        "output": {"dir": str(output), "format": form},
    }
    for name, value in changes.items():
        values[name] = values.get(name, {}) | value
    return train_config(bases, **values)


def exported(config: TrainConfig, model: Any, **options: Any) -> tuple[list[Path], list[str]]:
    """Export and return the folders, and the warnings."""
    warnings: list[str] = []
    options = {"progress": PROGRESS, "warn": warnings.append, **options}
    fence = output_fence(config)
    folders = export(model, load_tokenizer(config.model), config, fence=fence, **options)
    return [Path(folder) for folder in folders], warnings


def load_merged(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("base", "lora", "tokens"),
    [
        pytest.param("model", {"rslora": True, "dora": True}, (), id="dora and rslora"),
        pytest.param("model", {}, NEW, id="new tokens"),
        pytest.param("tied", {}, NEW, id="new tokens, tied head"),
        pytest.param("tied", {}, (), id="tied head"),
    ],
)
def test_an_adapter_and_its_merge_answer_like_the_trained_model(
    bases: Path, tmp_path: Path, base: str, lora: dict[str, Any], tokens: tuple[str, ...]
) -> None:
    from peft import AutoPeftModelForCausalLM

    config = settings(
        bases,
        tmp_path / "out",
        "both",
        model={"path": str(bases / base), "add_tokens": tokens, "chat_template": TEMPLATE},
        method={"lora": {"r": 4} | lora},
    )
    model = trained_model(config)
    (adapter, merged), warnings = exported(config, model)
    expected = probe_logits(model)
    assert expected.shape[1] == 768 + len(tokens)
    assert torch.equal(probe_logits(AutoPeftModelForCausalLM.from_pretrained(adapter)), expected)
    assert gap(probe_logits(load_merged(merged)), expected) <= 1e-4
    with safe_open(merged / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (base == "model")  # noqa: SIM118
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        assert any(file.get_tensor(name).any() for name in file.keys())  # noqa: SIM118
    for folder in (adapter, merged):
        tokenizer = load_tokenizer(
            config.model.model_copy(
                update={"path": str(folder), "add_tokens": (), "chat_template": None}
            )
        )
        assert tokenizer.convert_tokens_to_ids(list(tokens)) == [768, 769][: len(tokens)]
        assert tokenizer.chat_template == TEMPLATE
    is_plain = not lora and not tokens
    assert any("which vLLM does not load" in warning for warning in warnings) != is_plain
    assert ("which vLLM does not load" in (adapter / "README.md").read_text()) != is_plain
    assert "vLLM" not in (merged / "README.md").read_text()


@pytest.mark.parametrize(
    ("quantization", "precision", "tolerance"),
    [
        pytest.param("nf4", "fp32", 1e-4, id="nf4"),
        pytest.param("nf4", "bf16", 2e-2, id="nf4 in bf16"),
        pytest.param("int8", "fp32", 5e-2, id="int8"),
    ],
)
def test_a_quantised_base_is_merged_as_it_was_trained_against(
    bases: Path, tmp_path: Path, quantization: str, precision: str, tolerance: float
) -> None:
    from peft import PeftModel

    config = settings(
        bases,
        tmp_path / "out",
        "both",
        method={"type": "qlora", "quantization": quantization},
        model={"add_tokens": NEW},
        training={"precision": precision},
    )
    model = trained_model(config)
    (adapter, merged), warnings = exported(config, model)
    expected = probe_logits(model)
    again = PeftModel.from_pretrained(load_model(config, CPU), str(adapter))
    assert torch.equal(probe_logits(again), expected)

    loaded = load_merged(merged)
    assert loaded.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
    assert gap(probe_logits(loaded), expected) <= tolerance
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())

    layer = model.get_base_model().model.layers[0].mlp.up_proj
    grown = (
        layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    )
    target = (full_weight(layer.base_layer, "weight").float() + grown).to(loaded.dtype)
    torch.testing.assert_close(loaded.model.layers[0].mlp.up_proj.weight, target)

    for text in ("\n".join(warnings), (merged / "README.md").read_text()):
        assert f"merged into the dequantised {quantization} base" in text
    card = (adapter / "README.md").read_text()
    assert f"trained against the base in {quantization}" in card
    assert "- qlora" in card


def test_a_large_model_is_written_as_several_files_that_load_as_one(
    bases: Path, tmp_path: Path
) -> None:
    config = settings(bases, tmp_path / "out", "merged", method={"type": "full", "lora": None})
    model = trained_model(config)
    ((folder,), _) = exported(config, model, max_shard_bytes=200_000)

    # What vLLM reads: safetensors with their index, the class, the tokenizer with its template.
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(set(index.values())) == shards
    assert set(index) == set(model.state_dict())
    settings_of = json.loads((folder / "config.json").read_text())
    assert settings_of["architectures"] == ["LlamaForCausalLM"]
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < {
        path.name for path in folder.iterdir()
    }
    assert torch.equal(probe_logits(load_merged(folder)), probe_logits(model))


def test_an_export_in_fp64_loses_nothing(bases: Path, tmp_path: Path) -> None:
    config = settings(bases, tmp_path / "out", "merged", training={"precision": "fp64"})
    model = trained_model(config)
    ((folder,), _) = exported(config, model)
    loaded = load_merged(folder)
    assert loaded.dtype == torch.float64
    assert gap(probe_logits(loaded), probe_logits(model)) <= 1e-6


def test_the_card_names_every_training_set_and_no_path_of_this_machine(
    bases: Path, tmp_path: Path
) -> None:
    more = bases / "more.jsonl"
    more.write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    began = tmp_path / "began"
    trained_model(settings(bases, tmp_path / "x", "adapter")).save_pretrained(
        str(began), save_embedding_layers=False
    )
    config = settings(
        bases,
        tmp_path / "out",
        "adapter",
        model={"base_name": "org/base"},
        method={"lora": {"r": 4, "start_from": str(began)}},
        data={"also": ({"path": str(more), "weight": 2.0},)},
    )
    ((folder,), warnings) = exported(config, trained_model(config))
    assert warnings == []
    text = (folder / "README.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("| content hash | ")]
    assert [len(part) for part in line.split(" | ")[1].split()] == [64, 64]
    assert str(tmp_path) not in text
    assert str(bases) not in text

"""Exports of models that several ranks share: what is written is what a single process would."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune_trainer.config import TrainConfig
from finetune_trainer.export.merge import probe_logits
from finetune_trainer.model.load import load_model
from support.checkpoint.checkpoint_fixtures import run_processes, step_path
from support.checkpoint.export_fixtures import export_from_ranks, trained_model
from support.launch.forked_ranks import attempt, events, tensors
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def settings(
    inputs: Path, folder: Path, strategy: str, method: Mapping[str, Any], **changes: Any
) -> TrainConfig:
    return train_config(
        folder,
        model={"path": str(inputs / "model")},
        data={"train": {"path": str(inputs / "train.jsonl")}, "max_seq_len": 64},
        strategy={"type": strategy},
        method=method,
        output={"format": "merged" if method["type"] == "full" else "both"},
        **changes,
    )


def loaded(config: TrainConfig, folder: str = "") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(Path(config.output.dir) / folder, dtype="auto")


def with_adapter(config: TrainConfig) -> Any:
    from peft import PeftModel

    adapter = str(Path(config.output.dir) / "adapter")
    return PeftModel.from_pretrained(load_model(config, CPU), adapter)


def adapter_of(config: TrainConfig, folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(config.output.dir) / folder / "adapter_model.safetensors")


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_what_ranks_share_is_exported_whole(inputs: Path, tmp_path: Path, strategy: str) -> None:
    methods: dict[str, dict[str, Any]] = {
        "full": {"type": "full", "lora": None},
        "lora": {"type": "lora", "lora": {"r": 4, "dora": True}},
    }
    if strategy == "fsdp":
        methods["nf4"] = {"type": "qlora", "quantization": "nf4", "lora": {"r": 4}}
    configs = {
        name: settings(inputs, tmp_path / name, strategy, method)
        for name, method in methods.items()
    }
    for name in [name for name in methods if name != "full"]:
        alone = settings(inputs, tmp_path / f"{name}-alone", strategy, methods[name])
        output = alone.output.model_copy(update={"format": "adapter"})
        configs[f"{name}-alone"] = alone.model_copy(update={"output": output})
    codes = run_processes(
        export_from_ranks,
        tmp_path / "ranks",
        list(configs.values()),
        world_size=2,
        deepspeed=strategy == "zero3",
    )
    assert codes == [0, 0]
    for name, config in configs.items():
        expected = probe_logits(trained_model(config))
        if name == "full":
            assert torch.equal(probe_logits(loaded(config)), expected)
        elif name.endswith("-alone"):
            written = adapter_of(config, "")
            both = adapter_of(configs[name.removesuffix("-alone")], "adapter")
            assert written.keys() == both.keys()
            assert all(torch.equal(written[key], both[key]) for key in written)
            size = sum(tensor.numel() * tensor.element_size() for tensor in written.values())
            assert int(Path(f"{config.output.dir}.gathered").read_text()) == size
        else:
            assert torch.equal(probe_logits(with_adapter(config)), expected)
            assert gap(probe_logits(loaded(config, "merged")), expected) <= 1e-4


@pytest.mark.parametrize(
    ("strategy", "method"),
    [("zero1", "lora"), pytest.param("zero2", "full", marks=pytest.mark.full)],
)
def test_weights_trained_in_bf16_are_exported_as_they_are_kept_in_fp32(
    inputs: Path, tmp_path: Path, strategy: str, method: str
) -> None:
    chosen = {"type": method, "lora": {"r": 4} if method == "lora" else None}
    steps = {"max_steps": 2, "precision": "bf16"}
    config = settings(inputs, tmp_path, strategy, chosen, training=steps)
    assert attempt(config) == [0, 0]

    kept = tensors(step_path(Path(config.checkpoint.dir), 2))
    trained = {n.removeprefix("model."): t for n, t in kept.items() if n.startswith("model.")}
    model = loaded(config) if method == "full" else with_adapter(config)
    written = {n: p for n, p in model.named_parameters() if method == "full" or ".lora_" in n}
    assert written.keys() == trained.keys()
    assert {p.dtype for p in written.values()} == {torch.float32}
    assert all(torch.equal(written[name], trained[name]) for name in trained)


def test_a_quantised_run_of_two_ranks_learns_and_leaves_what_answers_like_it(
    inputs: Path, tmp_path: Path
) -> None:
    method = {"type": "qlora", "quantization": "nf4", "lora": {"r": 4}}
    steps = {"max_steps": 6, "learning_rate": 1e-2, "precision": "bf16"}
    tokens = {"path": str(inputs / "model"), "add_tokens": ("<|think|>",)}
    config = settings(inputs, tmp_path, "ddp", method, training=steps)
    config = config.model_copy(update={"model": type(config.model).model_validate(tokens)})
    assert attempt(config) == [0, 0]

    losses = [event["loss"] for event in events(config) if event.get("loss")]
    assert losses[-1] < losses[0] - 0.2
    expected = probe_logits(with_adapter(config))
    assert gap(probe_logits(loaded(config, "merged")), expected) <= 2e-2
    settings_of = json.loads((Path(config.output.dir) / "merged/config.json").read_text())
    assert settings_of["vocab_size"] == 769

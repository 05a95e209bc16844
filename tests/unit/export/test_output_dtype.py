"""Models are exported in the dtype of their base if it can hold the update."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ExportError
from finetune_trainer.export import export
from finetune_trainer.model.load import load_model, load_tokenizer
from finetune_trainer.resuming import keep_output_dtype
from support.checkpoint.export_fixtures import PROGRESS, output_fence, trained_model
from support.data.text_fixtures import tiny_model
from support.launch.launches import train_config

CPU = torch.device("cpu")
LARGE, SMALL = 0.1, 1e-5  # of an update, beside weights of 0.02


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Save a model in bf16."""
    tiny_model(tmp_path / "model")
    return stored_as(tmp_path / "model", torch.bfloat16)


def stored_as(folder: Path, dtype: torch.dtype, *, only: str = "") -> Path:
    """Rewrite the weights whose names contain `only` in another dtype."""
    file = folder / "model.safetensors"
    tensors = {n: t.to(dtype) if only in n else t for n, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return folder


def settings(folder: Path, dtype: str | None = None, **changes: Any) -> TrainConfig:
    return train_config(
        folder.parent,
        world={"nproc_per_node": 1},
        output={"dtype": dtype, **changes.pop("output", {})},
        **changes,
    )


def trained(config: TrainConfig, update: float) -> Any:
    """Return the base in fp32 after an update of this size."""
    torch.manual_seed(0)
    model = load_model(config, CPU)
    assert model.dtype == torch.float32
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(update * torch.randn_like(parameter).sign())
    return model


def exported(config: TrainConfig, model: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the exported tensors, and the warnings about their dtype."""
    Path(config.data.sources[0].path).write_text('{"messages": []}\n')
    warnings: list[str] = []
    export(
        model,
        load_tokenizer(config.model),
        config,
        fence=output_fence(config),
        progress=PROGRESS,
        warn=warnings.append,
    )
    folder = Path(config.output.dir)
    tensors = load_file(folder / "model.safetensors")
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype)[6:]
    return tensors, [sentence for sentence in warnings if "output.dtype" in sentence]


def dtypes(tensors: dict[str, torch.Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors.values()}


def test_auto_rounds_a_large_update_to_the_dtype_of_the_base(base: Path) -> None:
    config = settings(base)
    model = trained(config, LARGE)
    tensors, warnings = exported(config, model)
    assert dtypes(tensors) == {torch.bfloat16}
    assert warnings == []
    state = model.state_dict()
    assert all(torch.equal(t, state[name].bfloat16()) for name, t in tensors.items())
    assert model.dtype == torch.float32, "the trained model does not change"


def test_auto_keeps_an_update_that_would_be_rounded_away(base: Path) -> None:
    config = settings(base)
    model = trained(config, SMALL)
    tensors, (warning,) = exported(config, model)
    assert dtypes(tensors) == {torch.float32}
    assert (
        "auto exports float32: torch.bfloat16, the dtype of the base model, would keep" in warning
    )
    state = model.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in tensors.items())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_a_configured_dtype_is_exported(base: Path, dtype: str, expected: torch.dtype) -> None:
    config = settings(base, dtype)
    tensors, warnings = exported(config, trained(config, SMALL))
    assert (dtypes(tensors), warnings) == ({expected}, [])


def test_most_bytes_decide_in_a_base_of_mixed_dtypes(base: Path) -> None:
    stored_as(base, torch.float32, only="norm")
    config = settings(base)
    assert dtypes(exported(config, trained(config, LARGE))[0]) == {torch.bfloat16}
    stored_as(base, torch.float32, only="proj")
    stored_as(base, torch.float32, only="embed")
    config = settings(base, output={"dir": str(base.parent / "second")})
    assert dtypes(exported(config, trained(config, LARGE))[0]) == {torch.float32}


def test_added_tokens_are_exported_with_the_rest(base: Path) -> None:
    config = settings(base, model={"path": str(base), "add_tokens": ("<|think|>",)})
    tensors, warnings = exported(config, trained(config, LARGE))
    assert (dtypes(tensors), warnings) == ({torch.bfloat16}, [])


def test_a_base_that_cannot_be_compared_is_exported_in_fp32(base: Path) -> None:
    config = settings(base)
    model = trained(config, LARGE)
    tensors = load_file(base / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    assert dtypes(exported(config, model)[0]) == {torch.float32}


def test_a_weight_beyond_the_range_of_fp16_fails_the_export(base: Path) -> None:
    config = settings(base, "float16")
    model = trained(config, SMALL)
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    with pytest.raises(ExportError, match=r"float16 cannot hold model\.norm\.weight"):
        exported(config, model)
    assert not (Path(config.output.dir) / "model.safetensors").exists()


def test_a_merged_model_has_the_configured_dtype(base: Path) -> None:
    method = {"type": "lora", "lora": {"r": 4}}
    config = settings(base, "bfloat16", method=method, training={"precision": "fp32"})
    assert dtypes(exported(config, trained_model(config))[0]) == {torch.bfloat16}


def test_an_adapter_has_no_output_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"output\.dtype float16 has no effect with spec"):
        settings(
            tmp_path / "model",
            "float16",
            method={"type": "lora", "lora": {"r": 4}},
            output={"format": "adapter"},
        )


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        pytest.param([(0, False), (4, True)], None, id="began with this version"),
        pytest.param([(4, True)], "float32", id="began with an earlier version"),
        pytest.param([(4, True), (8, True)], "float32", id="resumed twice"),
        pytest.param([(0, True), (4, True)], None, id="no checkpoint of an earlier version"),
        pytest.param([(4, False)], None, id="a new job from another job's checkpoint"),
    ],
)
def test_a_job_of_an_earlier_version_keeps_fp32(
    attempts: list[tuple[int, bool]], expected: str | None, tmp_path: Path
) -> None:
    for first_step, is_continued in attempts:
        config = settings(tmp_path / "model", checkpoint={"is_continued": is_continued})
        run: Any = SimpleNamespace(config=config, world=SimpleNamespace(is_main=True))
        keep_output_dtype(run, first_step)
    assert run.config.output.dtype == expected

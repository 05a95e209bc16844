"""A base with an adapter beside its weights is refused, unless the run has a checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.load import load_model
from finetune_trainer.refusals import Refusals
from support.checkpoint.export_fixtures import export_config
from support.data.text_fixtures import tiny_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tiny_model(tmp_path / "base")
    settings = {"peft_type": "LORA", "base_model_name_or_path": "org/other", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_model_with_an_adapter_is_refused_with_both_remedies(
    base: Path, tmp_path: Path, method: str
) -> None:
    config = export_config(base, tmp_path / "output", method=method, format="merged")
    for device in ("cpu", "meta"):
        with pytest.raises(ConfigError, match="holds a model and an adapter") as caught:
            load_model(config, torch.device(device))
        assert "spec.method.lora.startFrom" in str(caught.value)
        assert str(base) in str(caught.value)


def test_a_run_with_a_checkpoint_is_only_warned(base: Path, tmp_path: Path) -> None:
    warnings: list[str] = []
    refusals = Refusals(is_new=False, warn=warnings.append)
    config = export_config(base, tmp_path / "output")
    load_model(config, torch.device("meta"), refusals)
    assert "holds a model and an adapter" in warnings[0]


def test_a_folder_with_an_adapter_alone_has_its_own_advice(base: Path, tmp_path: Path) -> None:
    (base / "model.safetensors").unlink()
    config = export_config(base, tmp_path / "output")
    with pytest.raises(ConfigError, match="it holds an adapter and no model"):
        load_model(config, torch.device("cpu"))

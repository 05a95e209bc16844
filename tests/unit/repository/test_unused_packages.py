"""Which optional packages a rank leaves out, and that Python finds them no more then."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.unused_packages import unused_packages
from support.launch.launches import clean_environment, train_config

HIDING = """
import importlib.util, sys
from pathlib import Path
from finetune_trainer.config import TrainConfig
from finetune_trainer.unused_packages import hide_unused

hide_unused(TrainConfig.read(Path(sys.argv[1])))
for name in ("deepspeed", "bitsandbytes", "torchao"):
    assert importlib.util.find_spec(name) is None, name
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
"""


def write_model(folder: Path, **settings: Any) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        pytest.param({}, ["deepspeed", "bitsandbytes", "torchao"], id="a plain job"),
        pytest.param({"strategy": {"type": "zero2"}}, ["bitsandbytes", "torchao"], id="ZeRO"),
        pytest.param(
            {"method": {"type": "qlora", "quantization": "nf4", "lora": {"r": 4}}},
            ["deepspeed"],
            id="QLoRA",
        ),
        pytest.param({"training": {"float8": True}}, ["deepspeed", "bitsandbytes"], id="float8"),
        pytest.param({"model": {"path": "org/in-a-hub"}}, ["deepspeed"], id="not known yet"),
    ],
)
def test_what_neither_strategy_nor_weights_ask_for_is_left_out(
    changes: dict[str, Any], unused: list[str], tmp_path: Path
) -> None:
    write_model(tmp_path)
    assert unused_packages(train_config(tmp_path, **changes)) == unused


def test_quantised_weights_may_need_any_package_that_quantises(tmp_path: Path) -> None:
    write_model(tmp_path, quantization_config={"quant_method": "bitsandbytes"})
    assert unused_packages(train_config(tmp_path)) == ["deepspeed"]


def test_hidden_packages_are_neither_found_nor_imported(tmp_path: Path) -> None:
    write_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(train_config(tmp_path).to_json())
    command = [sys.executable, "-c", HIDING, str(path)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

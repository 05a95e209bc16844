"""Python files beside a manifest are files like any other: none of them is run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.api.builders import manifest
from support.launch.launches import clean_environment, train_config
from support.launch.tiny_run import write_inputs

NAMES = ("datasets", "h2", "numpy", "psutil", "pydantic", "torch", "transformers", "yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny job whose folder holds Python files that leave a mark."""
    write_inputs(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest()))
    text = f"open({str(tmp_path / 'mark')!r}, 'a').write(__file__)\nraise SystemExit(0)\n"
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = clean_environment(XDG_CACHE_HOME=str(folder / "cache"), HF_HUB_OFFLINE="1")
    del environ["PYTHONPATH"], environ["PYTHONWARNINGS"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


@pytest.mark.full
def test_a_preview_runs_nothing_that_lies_beside_the_manifest(folder: Path) -> None:
    by_module = (sys.executable, "-m", "finetune_operator")
    done = run(*by_module, "preview", "job.yaml", "--rows", "1", folder=folder)
    assert not (folder / "mark").exists()
    assert (done.returncode, done.stderr) == (0, "")
    assert "[[" in done.stdout


@pytest.mark.full
def test_a_trainer_and_its_ranks_run_nothing_of_the_folder_they_start_in(folder: Path) -> None:
    """However it is started: torchrun and Azure ML know nothing of `-P`."""
    training = {"global_batch_size": 1, "max_steps": 1, "learning_rate": 1e-3}
    config = train_config(folder, world={"nproc_per_node": 1}, training=training)
    (folder / "config.json").write_text(config.to_json())
    done = run(sys.executable, "-m", "finetune_trainer", "config.json", folder=folder)
    assert not (folder / "mark").exists()
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "output" / "finetune-export.json").read_text())
    assert record["isWhole"]

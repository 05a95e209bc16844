"""Python files beside a manifest are files like any other: none of them is run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import manifest
from launches import clean_environment
from tiny_run import write_inputs

NAMES = ("datasets", "h2", "numpy", "psutil", "pydantic", "torch", "transformers", "yaml")
FTCTL = (str(Path(sys.executable).with_name("ftctl")),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny job whose folder holds Python files that leave a mark."""
    write_inputs(tmp_path)
    settings: dict[str, Any] = {
        "training": {"maxSeqLength": 64, "maxSteps": 1, "learningRate": 1e-3},
        "backend": {"local": {"runDirectory": "run"}},
        "output__format": "both",
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest(**settings)))
    text = f"open({str(tmp_path / 'mark')!r}, 'a').write(__file__)\nraise SystemExit(0)\n"
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = clean_environment(XDG_CACHE_HOME=str(folder / "cache"), HF_HUB_OFFLINE="1")
    del environ["PYTHONPATH"], environ["PYTHONWARNINGS"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_a_preview_runs_nothing_that_lies_beside_the_manifest(folder: Path) -> None:
    by_module = (sys.executable, "-m", "finetune_operator")
    done = run(*by_module, "preview", "job.yaml", "--rows", "1", folder=folder)
    assert not (folder / "mark").exists()
    assert (done.returncode, done.stderr) == (0, "")
    assert "[[" in done.stdout


def test_a_job_runs_nothing_that_lies_beside_its_manifest(folder: Path) -> None:
    done = run(*FTCTL, "run", "job.yaml", folder=folder)
    assert not (folder / "mark").exists()
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((folder / "run" / "output" / "finetune-export.json").read_text())
    assert record["isWhole"]


def test_a_trainer_that_another_launcher_starts_runs_nothing_of_its_folder(folder: Path) -> None:
    done = run(sys.executable, "-m", "finetune_trainer", folder=folder)
    assert not (folder / "mark").exists()
    assert (done.returncode, done.stderr) == (78, "usage: python -m finetune_trainer CONFIG\n")

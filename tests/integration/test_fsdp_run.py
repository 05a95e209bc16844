"""A whole run under FSDP2, killed on two ranks and finished by one: nothing of it is lost."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetune_trainer.config import Termination
from launches import clean_environment, train_config
from tiny_run import write_inputs

STEPS = 6


def run(
    inputs: Path, folder: Path, *, environ: dict[str, str] | None = None, **changes: Any
) -> int:
    """Start the trainer as a user does, and return its exit code."""
    settings: dict[str, Any] = {
        "model": {"path": str(inputs / "model"), "base_name": "org/tiny"},
        "data": {
            "train": {"path": str(inputs / "train.jsonl")},
            "eval": {"path": str(inputs / "eval.jsonl")},
            "format": "instruction",
            "columns": {"instruction": "prompt", "output": "completion"},
            "max_seq_len": 64,
            "cache_dir": str(inputs / "cache"),
        },
        "method": {"type": "lora", "lora": {"r": 4}},
        "training": {"max_steps": STEPS, "eval_every_steps": 2},
        "checkpoint": {"every_steps": 2},
        "output": {"format": "both"},
        "telemetry": {"sample_prompts": ["What is train number 3 plus 3?"]},
    }
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(train_config(folder, **{**settings, **changes}).to_json())
    trained = subprocess.run(
        [sys.executable, "-m", "finetune_trainer", str(path)],
        env=clean_environment(HF_HUB_OFFLINE="1", PYTHONWARNINGS="default", **(environ or {})),
        stdout=subprocess.DEVNULL,
        timeout=240,
        check=False,
    )
    return trained.returncode


def last_words(folder: Path) -> Termination:
    return Termination.read(folder / "termination.json")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_one_rank_finishes_what_two_began_with_the_numbers_of_ddp(
    inputs: Path, tmp_path: Path
) -> None:
    plain, folder = tmp_path / "ddp", tmp_path / "fsdp"
    one, fsdp = {"nproc_per_node": 1}, {"type": "fsdp"}
    assert run(inputs, plain, world=one) == 0

    kill = {"FINETUNE_FAILPOINT": "after-optimizer@5:rank=1"}
    assert run(inputs, folder, strategy=fsdp, environ=kill) == 137
    assert run(inputs, folder, strategy=fsdp, world=one) == 78, "as if nothing was to be continued"
    going_on = {"every_steps": 2, "is_continued": True}
    assert run(inputs, folder, strategy=fsdp, world=one, checkpoint=going_on) == 0

    expected, found = last_words(plain).progress, last_words(folder).progress
    assert expected is not None
    assert found is not None
    assert found.resumed_step in (2, 4), "the save of step 4 begins when that of step 2 is done"
    assert any("goes on with one process" in warning for warning in found.warnings)
    assert found.loss == pytest.approx(expected.loss, abs=3e-6)
    assert found.eval_loss == pytest.approx(expected.eval_loss, abs=3e-6)
    assert found.samples == expected.samples
    assert all(sample.before and sample.after for sample in found.samples)
    for name in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        ours, theirs = (load_file(place / "output" / name) for place in (folder, plain))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert (ours[key] - tensor).norm() <= 5e-5 * tensor.norm()

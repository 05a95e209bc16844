"""A whole run under FSDP2, killed on two ranks and finished by one: nothing of it is lost."""

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetune_trainer.config import ExitCode, Progress, TrainConfig
from finetune_trainer.failpoints import ENV_FAILPOINT
from support.launch.forked_ranks import Ranks, attempt
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs

STEPS = 6


def run_config(inputs: Path, folder: Path, **changes: Any) -> TrainConfig:
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
    return train_config(folder, **{**settings, **changes})


def finished(config: TrainConfig) -> Progress:
    """Run an attempt of one rank to its end, and return the progress in its termination message."""
    ranks = Ranks(config)
    assert ranks.codes() == [ExitCode.DONE]
    progress = ranks.termination().progress
    assert progress is not None
    return progress


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.full
def test_one_rank_finishes_what_two_began_with_the_numbers_of_ddp(
    inputs: Path, tmp_path: Path
) -> None:
    plain, folder = tmp_path / "ddp", tmp_path / "fsdp"
    one, fsdp = {"nproc_per_node": 1}, {"type": "fsdp"}
    expected = finished(run_config(inputs, plain, world=one))

    kill = {ENV_FAILPOINT: "after-optimizer@5:rank=1"}
    assert attempt(run_config(inputs, folder, strategy=fsdp), kill)[1] == -signal.SIGKILL
    alone = run_config(inputs, folder, strategy=fsdp, world=one)
    assert attempt(alone) == [ExitCode.CONFIG], "as if nothing was to be continued"
    going_on = {"every_steps": 2, "is_continued": True}
    found = finished(run_config(inputs, folder, strategy=fsdp, world=one, checkpoint=going_on))

    assert found.resumed_step in (2, 4), "the save of step 4 begins when that of step 2 is done"
    assert any("continues with one process" in warning for warning in found.warnings)
    assert found.loss == pytest.approx(expected.loss, abs=3e-6)
    assert found.eval_loss == pytest.approx(expected.eval_loss, abs=3e-6)
    assert found.samples == expected.samples
    assert all(sample.before and sample.after for sample in found.samples)
    for name in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        ours, theirs = (load_file(place / "output" / name) for place in (folder, plain))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert (ours[key] - tensor).norm() <= 5e-5 * tensor.norm()

"""Runs with 8-bit moments and bf16 parameters: as good as fp32, and lost by no kill."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune_trainer.config import ExitCode, TrainConfig
from finetune_trainer.failpoints import ENV_FAILPOINT
from support.checkpoint.checkpoint_fixtures import step_path
from support.launch.forked_ranks import Ranks, attempt, events, numbers, tensors
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs

STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run_config(inputs: Path, folder: Path, ranks: int = 1, **changes: Any) -> TrainConfig:
    training = {
        "max_steps": STEPS,
        "precision": "bf16",
        "optimizer": "adamw8bit",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
    }
    settings: dict[str, Any] = {
        "world": {"nproc_per_node": ranks},
        "model": {"path": str(inputs / "model"), "base_name": "org/tiny"},
        "data": {
            "train": {"path": str(inputs / "train.jsonl")},
            "eval": {"path": str(inputs / "eval.jsonl")},
            "max_seq_len": 64,
        },
        "method": {"type": "full"},
        "checkpoint": {"every_steps": 2},
        "output": {"format": "merged"},
    }
    training |= changes.pop("training", {})
    folder.mkdir(exist_ok=True)
    return train_config(folder, training=training, **{**settings, **changes})


def last_state(config: TrainConfig) -> dict[str, torch.Tensor]:
    return tensors(step_path(Path(config.checkpoint.dir), STEPS))


def different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]


@pytest.mark.full
@pytest.mark.timeout(200)
def test_200_steps_come_within_2_percent_of_the_loss_of_fp32(inputs: Path, tmp_path: Path) -> None:
    """Rounded to the nearest in place of by chance, it would be 39 %."""
    running = {}
    for optimizer, precision in (("adamw8bit", "bf16"), ("adamw", "fp32")):
        training = {"max_steps": 200, "optimizer": optimizer, "precision": precision}
        config = run_config(
            inputs, tmp_path / optimizer, training=training, checkpoint={"every_steps": 200}
        )
        running[optimizer] = Ranks(config)
    ends = {}
    for optimizer, ranks in running.items():
        assert ranks.codes() == [ExitCode.DONE]
        told = numbers(ranks.config)
        losses = [values[0] for values in told["steps"].values()]
        ends[optimizer] = (sum(losses[-20:]) / 20, losses[-1], told["evaluations"][200])
        assert ends[optimizer][0] < losses[0] / 10, "it has learnt"
    for found, expected in zip(ends["adamw8bit"], ends["adamw"], strict=True):
        assert found <= 1.02 * expected, (ends, "mean of the last 20 steps, last step, held out")


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.full), "fsdp"])
def test_a_killed_run_goes_on_bit_for_bit(inputs: Path, tmp_path: Path, strategy: str) -> None:
    changes = {"strategy": {"type": strategy}}
    unbroken = run_config(inputs, tmp_path / "unbroken", 2, **changes)
    assert attempt(unbroken) == [ExitCode.DONE] * 2
    broken = run_config(inputs, tmp_path / "broken", 2, **changes)
    assert attempt(broken, {ENV_FAILPOINT: "after-optimizer@5:rank=1"})[1] == -signal.SIGKILL
    assert attempt(broken) == [ExitCode.DONE] * 2
    assert [one["step"] for one in events(broken) if one["event"] == "resumed"] in ([2], [4])

    state = last_state(broken)
    assert {name: tensor for name, tensor in state.items() if "codes" in name}
    assert different(state, last_state(unbroken)) == []
    exported = load_file(tmp_path / "broken" / "output" / "model.safetensors")
    weights = {f"model.{name}": tensor for name, tensor in exported.items()}
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert different(weights, {name: state[name] for name in weights}) == []


@pytest.mark.full
@pytest.mark.timeout(200)
def test_one_rank_goes_on_with_what_two_have_left(inputs: Path, tmp_path: Path) -> None:
    """Codes and weights are read as they were; another order of sums makes what differs."""
    asked: dict[str, Any] = {"telemetry": {"sample_prompts": ["What is 1 plus 1?"]}}
    unbroken = run_config(inputs, tmp_path / "unbroken", **asked)
    assert attempt(unbroken) == [ExitCode.DONE]
    strategy = {"type": "fsdp"}
    two = run_config(inputs, tmp_path / "fewer", 2, strategy=strategy, **asked)
    stop = {ENV_FAILPOINT: "before-optimizer@3:rank=0:SIGTERM"}
    assert attempt(two, stop) == [ExitCode.PREEMPTED] * 2
    going_on = {"every_steps": 2, "is_continued": True}
    one = run_config(inputs, tmp_path / "fewer", strategy=strategy, checkpoint=going_on, **asked)
    ranks = Ranks(one)
    assert ranks.codes() == [ExitCode.DONE]
    progress = ranks.termination().progress
    assert progress is not None
    assert all(sample.before and sample.after for sample in progress.samples)
    assert len(progress.samples) == 1

    found, expected = (
        [values[0] for values in numbers(config)["steps"].values()] for config in (one, unbroken)
    )
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_run_does_not_go_on_with_another_optimizer(inputs: Path, tmp_path: Path) -> None:
    stop = {ENV_FAILPOINT: "before-optimizer@1:SIGTERM"}
    config = run_config(inputs, tmp_path / "run")
    assert attempt(config, stop) == [ExitCode.PREEMPTED]
    ranks = Ranks(run_config(inputs, tmp_path / "run", training={"optimizer": "adamw"}))
    assert ranks.codes() == [ExitCode.CONFIG]
    assert "another optimizer (spec.training.optimizer)" in ranks.termination().message

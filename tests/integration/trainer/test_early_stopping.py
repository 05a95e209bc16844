"""Early stopping: training ends when the held-out loss rises, and the best is exported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune_trainer.checkpoint.commit import ledger
from finetune_trainer.config import Progress, TrainConfig
from finetune_trainer.export.publish import ExportRecord
from finetune_trainer.failpoints import ENV_FAILPOINT, ENV_FAILPOINT_ONCE
from support.checkpoint.checkpoint_fixtures import step_path
from support.launch.forked_ranks import Ranks, attempt, numbers, tensors
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs

PATIENCE, MOST_STEPS = 2, 60


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run_config(inputs: Path, folder: Path, ranks: int) -> TrainConfig:
    folder.mkdir()
    return train_config(
        folder,
        world={"nproc_per_node": ranks},
        model={"path": str(inputs / "model")},
        data={
            "train": {"path": str(inputs / "train.jsonl")},
            "eval": {"path": str(inputs / "eval.jsonl")},
            "max_seq_len": 64,
        },
        method={"type": "lora", "lora": {"r": 4}},
        output={"format": "adapter"},
        training={
            "max_steps": MOST_STEPS,
            "learning_rate": 0.1,  # too much: soon the held-out loss rises
            "schedule": "constant",
            "eval_every_steps": 1,
            "early_stopping": {"patience": PATIENCE},
        },
        checkpoint={"keep": 1},
    )


@pytest.mark.full
def test_training_stops_early_on_all_ranks_and_exports_the_best_weights(
    inputs: Path, tmp_path: Path
) -> None:
    config = run_config(inputs, tmp_path / "run", ranks=2)
    ranks = Ranks(config)
    assert ranks.codes() == [0, 0]
    evaluations: dict[int, float] = numbers(config)["evaluations"]
    last, words = max(evaluations), ranks.termination()
    best = min((step for step in evaluations if step), key=lambda step: evaluations[step])
    assert best < last == best + PATIENCE < MOST_STEPS
    assert words.message == f"stopped early at step {last}, best step {best}"
    assert (words.step, ranks.termination(1).message) == (last, words.message)
    progress = Progress.read(Path(config.run_dir) / "progress.json")
    assert progress.best_checkpoint is not None
    assert (progress.step, progress.total_steps) == (last, last)
    assert progress.best_checkpoint.step == best
    assert (progress.exported_step, progress.eval_loss) == (best, evaluations[best])
    assert progress.loss == numbers(config)["steps"][best][0]
    card = (Path(config.output.dir) / "README.md").read_text()
    assert f"trained for {best} steps" in card
    assert f"| held-out loss | {evaluations[0]:.4f} | {evaluations[best]:.4f} |" in card
    assert f"| training loss of step {best} | - | {progress.loss:.4f} |" in card
    assert ExportRecord.read(Path(config.output.dir) / "finetune-export.json").step == best

    root = Path(config.checkpoint.dir)
    assert [ref.step for ref in ledger(root)] == [last, best]
    exported = load_file(Path(config.output.dir) / "adapter_model.safetensors")
    trained = tensors(step_path(root, best))
    for name, tensor in exported.items():
        inside = name.replace(".weight", ".default.weight")
        assert torch.equal(tensor, trained[f"model.{inside}"]), name

    killed = run_config(inputs, tmp_path / "killed", ranks=2)
    kills = f"after-optimizer@{last}:rank=1,exporting:rank=0"
    environ = {ENV_FAILPOINT: kills, ENV_FAILPOINT_ONCE: str(tmp_path / "marks")}
    assert [attempt(killed, environ) == [0, 0] for _ in range(3)] == [False, False, True]
    assert numbers(killed) == numbers(config)
    again = load_file(Path(killed.output.dir) / "adapter_model.safetensors")
    assert [name for name in exported if not torch.equal(again[name], exported[name])] == []

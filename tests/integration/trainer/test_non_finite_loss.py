"""A loss that is not a number ends the run a step later at most, and never reaches the disk."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from finetune_trainer.checkpoint.commit import ledger
from finetune_trainer.config import ExitCode, FailureClass, TrainConfig
from support.launch.forked_ranks import Ranks, attempt, events, tensors
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs


def run_config(folder: Path, steps: int, learning_rate: float) -> TrainConfig:
    return train_config(
        folder,
        model={"path": str(folder / "model")},
        data={"train": {"path": str(folder / "train.jsonl")}, "max_seq_len": 64},
        training={
            "max_steps": steps,
            "learning_rate": learning_rate,
            "schedule": "constant",
        },
        checkpoint={"every_steps": 1, "keep": 5},
    )


def test_a_loss_that_is_not_a_number_names_its_step_and_rows(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    assert attempt(run_config(tmp_path, 2, 1e-3)) == [0, 0]
    config = run_config(tmp_path, 6, 1e12)  # the third step makes a model that is no longer one
    ranks = Ranks(config)
    assert ranks.codes() == [ExitCode.DO_NOT_RESTART] * 2
    words = ranks.termination()
    assert words.failure_class is FailureClass.DO_NOT_RESTART
    assert words.message.startswith("the loss of step 4 is nan (rank 0, a pack of row ")
    assert "; rank 1, a pack of row " in words.message
    for rank in (0, 1):
        lost = [one["step"] for one in events(config, rank) if one["event"] == "loss_not_finite"]
        assert lost == [4]
    assert " of spec.dataset.source" in words.message
    assert "lower spec.training.learningRate" in words.message
    committed = {ref.step: Path(ref.path) for ref in ledger(Path(config.checkpoint.dir))}
    assert {1, 2} <= committed.keys() <= {1, 2, 3}, "and 3 where there was time to write it"
    for folder in committed.values():
        assert all(tensor.isfinite().all() for tensor in tensors(folder).values())


def test_a_base_model_that_is_none_is_not_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    file = write_inputs(tmp_path) / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"] *= float("nan")
    save_file(weights, file, {"format": "pt"})
    ranks = Ranks(run_config(tmp_path, 2, 1e-3))
    assert ranks.codes() == [ExitCode.DO_NOT_RESTART] * 2
    message = ranks.termination().message
    assert message.startswith("the loss of step 1 is nan (rank 0, a pack of row ")
    assert "look for non-finite weights in spec.model.source" in message
    assert "learningRate" not in message

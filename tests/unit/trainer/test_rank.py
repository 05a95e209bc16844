"""One rank alone, from its first check to the exported model, on a tiny model."""

import json
from pathlib import Path

import pytest
import torch

from finetune_trainer.config import Phase, TrainConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.errors import FolderTakenError, OutputNotWritableError
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.data.text_fixtures import tiny_model
from support.launch.launches import train_config

ALONE = World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "base")


def config(folder: Path, model: Path, **changes: object) -> TrainConfig:
    rows = [{"prompt": f"Question {n}?", "completion": f"Answer {n}."} for n in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "world": {"nproc_per_node": 1},
        "model": {"path": str(model)},
        "method": {"type": "lora", "lora": {"r": 2}},
        "output": {"format": "adapter"},
        "training": {"global_batch_size": 1, "max_steps": 2, "learning_rate": 1e-3},
    } | changes
    return train_config(folder, **changes)


def train(made: TrainConfig) -> Telemetry:
    fence = claim_folders(made, lambda: False)
    telemetry = Telemetry(made, rank=0, world_size=1)
    try:
        run(made, ALONE, StopSignal(), telemetry, fence)
    finally:
        telemetry.close()
    return telemetry


def test_rows_that_are_longer_than_the_model_was_made_for_are_told(
    tmp_path: Path, model: Path
) -> None:
    made = config(tmp_path, model, data={"max_seq_len": 4096, "format": "text"})
    rows = Path(made.data.train.path)
    rows.write_text(json.dumps({"text": "word " * 2500}) + "\n")
    said = [one for one in train(made).progress.warnings if "is configured for 2048" in one]
    assert len(said) == 1
    assert "lower spec.training.maxSeqLength to 2048" in said[0]


def test_a_loss_that_cannot_be_fused_with_the_head_is_told(tmp_path: Path, model: Path) -> None:
    targets = ("q_proj", "lm_head")
    for folder, names, is_told in (("plain", targets[:1], False), ("head", targets, True)):
        (tmp_path / folder).mkdir()
        method = {"type": "lora", "lora": {"r": 2, "target_modules": names}}
        said = train(config(tmp_path / folder, model, method=method)).progress.warnings
        assert any("not fused with the model's head" in one for one in said) == is_told
    training = {"global_batch_size": 1, "max_steps": 2, "learning_rate": 1e-3, "fused_head": False}
    (tmp_path / "asked").mkdir()
    asked = config(tmp_path / "asked", model, method=method, training=training)
    assert not any("not fused" in one for one in train(asked).progress.warnings)


def test_a_job_never_finishes_with_the_weights_of_another(tmp_path: Path, model: Path) -> None:
    train(config(tmp_path, model))
    output = tmp_path / "other"
    other = config(
        tmp_path,
        model,
        job={"name": "other", "uid": "u-2"},
        training={"global_batch_size": 1, "max_steps": 2, "learning_rate": 5e-3},
        output={"dir": str(output), "format": "adapter"},
    )
    whose = r"belongs to the job default/tiny \(uid u-1\), which wrote there before this one"
    with pytest.raises(FolderTakenError, match=whose):
        train(other)
    assert not output.exists()


def test_a_warm_up_over_all_steps_and_few_steps_are_warnings(tmp_path: Path, model: Path) -> None:
    training = {"global_batch_size": 99, "max_steps": None, "epochs": 2, "learning_rate": 1e-3}
    training["warmup"] = 500
    telemetry = train(config(tmp_path, model, training=training))
    few, warmup = (text for text in telemetry.progress.warnings if " step" in text)
    assert few.startswith("the whole run has 1 optimizer step, which change")
    assert warmup.startswith("spec.training.warmup 500 takes all 1 steps")
    assert telemetry.progress.phase is Phase.DONE


@pytest.mark.parametrize(
    ("output_format", "name"),
    [("adapter", "README.md"), ("merged", "config.json"), ("both", "merged/model.safetensors")],
)
def test_a_file_in_the_output_that_is_not_ours_is_refused_before_training(
    tmp_path: Path, model: Path, output_format: str, name: str
) -> None:
    made = config(tmp_path, model, output={"format": output_format})
    mine = tmp_path / "output" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    telemetry = Telemetry(made, rank=0, world_size=1)
    with pytest.raises(OutputNotWritableError, match=f"contains {name}, which no earlier export"):
        run(made, ALONE, StopSignal(), telemetry, claim_folders(made, lambda: False))
    telemetry.close()
    assert telemetry.progress.phase is Phase.STARTING
    assert mine.read_text() == "mine"


def test_an_earlier_export_of_ours_is_replaced_and_other_files_stay(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "notes.md").write_text("mine")
    train(config(tmp_path, model))
    train(config(tmp_path, model))  # resumes after the last step, and exports once more
    assert (tmp_path / "output" / "notes.md").read_text() == "mine"

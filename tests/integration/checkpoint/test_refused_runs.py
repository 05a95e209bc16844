"""Runs of release 0.1.0 that later versions refuse in a new job continue with a warning.

`release_0_1_0/runs-refused.tar.xz` holds runs that were killed in step 5, with checkpoints of
steps 2 and 4.
"""

import shutil
from pathlib import Path

import pytest

from finetune_trainer.config import Progress, TrainConfig
from support.cluster.last_release import unpack_run
from support.launch.forked_ranks import attempt, events

RECORDED_IN = "/tmp/release-0.1.0"
WARNINGS = {
    "left-out": r"turn 2 (tool) is left out by the chat template",
    "ended-twice": "some rows give other tokens now",
    "cut-model": "has 1 layers, and its files have others (model.layers.1)",
    "split-files": "holds several splits (test.jsonl; train.jsonl; validation.jsonl)",
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    unpack_run("runs-refused", folder)
    return folder


def config_of(stored: Path, name: str, folder: Path) -> TrainConfig:
    """Copy a stored run to `folder`, and return the configuration of its second attempt."""
    shutil.copytree(stored / name, folder, dirs_exist_ok=True)
    text = (folder / "config-1.json").read_text().replace(f"{RECORDED_IN}/{name}", str(folder))
    config = TrainConfig.model_validate_json(text)
    return config.model_copy(update={"job": config.job.model_copy(update={"attempt": 2})})


@pytest.mark.parametrize("name", WARNINGS)
def test_a_run_that_has_a_checkpoint_continues_with_a_warning(
    name: str, stored: Path, tmp_path: Path
) -> None:
    config = config_of(stored, name, tmp_path)

    assert attempt(config) == [0]

    assert [e["step"] for e in events(config) if e["event"] == "resumed"] == [4]
    warnings = Progress.read(Path(config.run_dir) / "progress.json").warnings
    assert any(WARNINGS[name] in sentence for sentence in warnings), warnings
    assert not any("the hash of the training data" in sentence for sentence in warnings)


def test_lora_on_quantised_files_continues_as_it_began(stored: Path, tmp_path: Path) -> None:
    config = config_of(stored, "quantised-files", tmp_path)

    assert attempt(config) == [0]

    assert [e["step"] for e in events(config) if e["event"] == "resumed"] == [4]
    assert Progress.read(Path(config.run_dir) / "progress.json").step == 6

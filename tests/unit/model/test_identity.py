"""Base weights are told apart by what is in them, whatever their names and sizes say."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from finetune_trainer.checkpoint.start import recorded
from finetune_trainer.config import CheckpointConfig, ModelConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.errors import ConfigError
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.model.identity import model_fingerprint, weights_fingerprint
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.checkpoint.checkpoint_fixtures import FINGERPRINT, JOB, make_state, open_store
from support.data.text_fixtures import tiny_model
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs

FIRST, SECOND = "a" * 40, "b" * 40
RESOLVE = """
import json
import sys
from functools import partial
from pathlib import Path

import torch
from finetune_trainer.checkpoint.start import recorded
from finetune_trainer.config import TrainConfig
from finetune_trainer.model.identity import pinned
from finetune_trainer.world import World

world = World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
for branch, commit, config in json.load(sys.stdin):
    Path(branch).write_text(commit)
    config = TrainConfig.model_validate(config)
    found = pinned(config, world, recorded(config.checkpoint, config.job))
    print(found.model.revision)
"""


def write(folder: Path, tensors: dict[str, torch.Tensor], *, parts: int = 1) -> ModelConfig:
    """Write a model of these weights, in so many files."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = sorted(tensors)
    if parts == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        placed = {name: f"model-{at % parts}.safetensors" for at, name in enumerate(names)}
        for file in set(placed.values()):
            save_file({n: tensors[n] for n in names if placed[n] == file}, folder / file)
        index = {"weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ModelConfig(path=str(folder))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {f"layers.{n}.w": torch.randn(40, 50, generator=generator) for n in range(3)}
    return made | {"norm": torch.ones(7), "scale": torch.tensor(1.0)}


def test_other_weights_of_the_same_names_and_sizes_are_others(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one", weights()), write(tmp_path / "other", weights(1))
    assert model_fingerprint(one) == model_fingerprint(other)
    assert weights_fingerprint(one) != weights_fingerprint(other)
    assert weights_fingerprint(one) == weights_fingerprint(one)


@pytest.mark.parametrize("name", sorted(weights()))
def test_every_tensor_counts(tmp_path: Path, name: str) -> None:
    changed = weights()
    changed[name] = changed[name] + 1
    one, other = write(tmp_path / "one", weights()), write(tmp_path / "other", changed)
    assert weights_fingerprint(one) != weights_fingerprint(other)


def test_the_same_weights_in_other_files_are_the_same(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one", weights()), write(tmp_path / "parts", weights(), parts=2)
    assert weights_fingerprint(one) == weights_fingerprint(other)


def test_a_damaged_file_of_weights_is_a_sentence(tmp_path: Path) -> None:
    model = write(tmp_path / "model", weights())
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"no json!")
    with pytest.raises(ConfigError, match=r"^spec\.model\.source: the weights of "):
        weights_fingerprint(model)


def test_a_checkpoint_on_other_weights_is_refused_and_an_old_one_is_read(tmp_path: Path) -> None:
    known = FINGERPRINT.model_copy(update={"weights": "one"})
    store = open_store(tmp_path / "old")
    store.save(1, make_state(1))
    store.wait()
    assert open_store(tmp_path / "old", fingerprint=known).restore(make_state(0)) is not None

    store = open_store(tmp_path / "new", fingerprint=known)
    store.save(1, make_state(1))
    store.wait()
    other = known.model_copy(update={"weights": "other"})
    content = r"another content of the base weights \(spec\.model\.source\)"
    with pytest.raises(ConfigError, match=content):
        open_store(tmp_path / "new", fingerprint=other).restore(make_state(0))


def cached_hub(folder: Path) -> Path:
    """Make what a download of two commits leaves, and return the file that names `main`'s."""
    repository = folder / "models--org--name"
    for commit in (FIRST, SECOND):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    return repository / "refs" / "main"


def test_an_attempt_loads_the_commit_that_its_checkpoint_was_trained_on(tmp_path: Path) -> None:
    """In a process of its own, which is offline and has another cache of the hub."""
    main = cached_hub(tmp_path)
    made = FINGERPRINT.model_copy(
        update={
            "model": model_fingerprint(ModelConfig(path="org/name")),
            "weights": weights_fingerprint(ModelConfig(path="org/name", revision=FIRST)),
        }
    )
    store = open_store(tmp_path / "checkpoints", fingerprint=made)
    store.save(1, make_state(1))
    store.wait()

    def attempt(commit: str, checkpoint: dict[str, Any]) -> tuple[str, str, Any]:
        config = train_config(tmp_path, model={"path": "org/name"}, checkpoint=checkpoint)
        return str(main), commit, config.model_dump(mode="json", by_alias=True)

    attempts = [
        attempt(FIRST, {"dir": str(tmp_path / "nothing")}),
        attempt(SECOND, {"dir": str(tmp_path / "nothing")}),
        attempt(SECOND, {}),  # as the branch moved after its first attempt
        attempt(SECOND, {"resume_from": "none"}),
    ]
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps(attempts),
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [FIRST, SECOND, FIRST, SECOND]


def test_what_a_named_checkpoint_was_made_of_is_known_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    theirs = FINGERPRINT.model_copy(update={"weights": "theirs"})
    for name, steps, fingerprint in (("named", 5, theirs), ("own", 3, FINGERPRINT)):
        store = open_store(tmp_path / name, fingerprint=fingerprint, job=JOB)
        store.save(steps, make_state(steps))
        store.wait()
    [named] = (tmp_path / "named").glob("step-5.*")
    own = CheckpointConfig(dir=str(tmp_path / "own"))
    assert recorded(own, JOB) == FINGERPRINT
    anew = own.model_copy(update={"resume_from": "none"})
    assert recorded(anew, JOB) is None
    again = anew.model_copy(update={"is_continued": True})
    assert recorded(again, JOB) == FINGERPRINT
    assert recorded(again, JOB.model_copy(update={"uid": "its successor"})) is None
    asked = own.model_copy(update={"resume_from": str(named)})
    assert recorded(asked, JOB) == theirs
    assert recorded(asked.model_copy(update={"is_continued": True}), JOB) == theirs
    gone = own.model_copy(update={"resume_from": str(tmp_path / "gone")})
    assert recorded(gone, JOB) is None


def test_weights_that_changed_in_the_folder_are_found_by_a_resume(tmp_path: Path) -> None:
    """Through a whole run, as Base and Instruct of one family differ in nothing else."""
    write_inputs(tmp_path)
    alone = World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    lora = {"type": "lora", "lora": {"r": 2}}

    def train(steps: int) -> None:
        training = {"global_batch_size": 1, "max_steps": steps, "learning_rate": 1e-3}
        config = train_config(
            tmp_path,
            world={"nproc_per_node": 1},
            method=lora,
            training=training,
            output={"format": "adapter"},
        )
        telemetry = Telemetry(config, rank=0, world_size=1)
        try:
            run(config, alone, StopSignal(), telemetry, claim_folders(config, lambda: False))
        finally:
            telemetry.close()

    train(1)
    other = tiny_model(tmp_path / "other", seed=1)
    shutil.copy(other / "model.safetensors", tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"another content of the base weights"):
        train(2)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"^spec\.model\.source: .*index\.json names .*secret"):
        weights_fingerprint(ModelConfig(path=str(tmp_path)))

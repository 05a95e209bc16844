"""`kill -9` at any point: what the next attempts end with is what nobody disturbed, bit for bit."""

import itertools
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.checkpoint.commit import read_manifest, write_manifest
from finetune_trainer.config import TrainConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.failpoints import ENV_FAILPOINT, ENV_FAILPOINT_ONCE, POINTS
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.checkpoint.checkpoint_fixtures import step_path
from support.launch.forked_ranks import attempt, events, numbers, tensors
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs

ALONE = World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
STEPS, SAVE_EVERY, EVAL_EVERY = 8, 2, 4
EVERY_POINT = (
    "tokenizing",
    "storing-tokens",
    "loading",
    "evaluating@0",
    "answering@0",
    "first-step@1",
    "mid-accumulation@2",
    "before-optimizer@3",
    "after-optimizer@4",
    "saving@4",
    "before-manifest@4",
    "before-commit@6",
    "after-commit@6",
    "restoring",
    "retention@8",
    "evaluating@8",
    "answering@8",
    "exporting",
    "before-publish",
)
IN_TRAINING = ("mid-accumulation", "before-optimizer", "after-optimizer")


def random_kills(seed: int, count: int) -> tuple[str, ...]:
    """Draw points of a step, of a save or of an evaluation, and the rank that dies there."""
    rng = random.Random(seed)
    kills: set[str] = set()
    while len(kills) < count:
        name = rng.choice([*IN_TRAINING, "before-manifest", "evaluating"])
        every = {"before-manifest": SAVE_EVERY, "evaluating": EVAL_EVERY}.get(name, 1)
        step = every * rng.randint(1, STEPS // every)
        kills.add(f"{name}@{step}:rank={rng.randrange(2)}")
    return tuple(sorted(kills))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run_config(inputs: Path, folder: Path, ranks: int, **changes: Any) -> TrainConfig:
    folder.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "world": {"nproc_per_node": ranks},
        "model": {"path": str(inputs / "model")},
        "data": {
            "train": {"path": str(inputs / "train.jsonl")},
            "eval": {"path": str(inputs / "eval.jsonl")},
            "max_seq_len": 64,
        },
        # Dropout shows whether a resumed run draws the masks of the unbroken one.
        "method": {"type": "lora", "lora": {"r": 4, "dropout": 0.2}},
        "output": {"format": "adapter"},
        "training": {"max_steps": STEPS, "learning_rate": 1e-2, "eval_every_steps": EVAL_EVERY},
        "checkpoint": {"every_steps": SAVE_EVERY, "keep": 1},
        "telemetry": {"sample_prompts": ["What is 1 plus 1?"]},
    }
    return train_config(folder, **(values | changes))


def outcome(config: TrainConfig) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return numbers(config), tensors(step_path(Path(config.checkpoint.dir), STEPS))


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What one rank and what two ranks come to when nothing happens."""
    found = {}
    for ranks in (1, 2):
        config = run_config(inputs, tmp_path_factory.mktemp("unbroken"), ranks)
        assert attempt(config) == [0] * ranks
        found[ranks] = outcome(config)
        assert list(found[ranks][0]["steps"]) == list(range(1, STEPS + 1))
        assert list(found[ranks][0]["evaluations"]) == [0, 4, 8]
    return found


def test_every_named_point_is_killed_at() -> None:
    assert {kill.split("@")[0] for kill in EVERY_POINT} == set(POINTS)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        pytest.param(1, EVERY_POINT, id="one rank at every point", marks=pytest.mark.full),
        pytest.param(2, random_kills(1, 6), id="one of two ranks at random points"),
        pytest.param(2, ("saving@2:rank=1", "after-commit@6:rank=0"), id="while two ranks save"),
    ],
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    ranks: int, kills: tuple[str, ...], inputs: Path, unbroken: dict[int, Any], tmp_path: Path
) -> None:
    config = run_config(inputs, tmp_path / "run", ranks)
    marks = tmp_path / "marks"
    environ = {ENV_FAILPOINT: ",".join(kills), ENV_FAILPOINT_ONCE: str(marks)}
    attempts = 0
    while (codes := attempt(config, environ)) != [0] * ranks:
        attempts += 1
        assert -signal.SIGKILL in codes, codes
        assert attempts <= len(kills)
    reached = os.listdir(marks)
    assert attempts <= len(reached), "two ranks may die in one attempt"
    assert ranks > 1 or sorted(reached) == sorted(kills), "a point was never reached"

    (told, state), (expected, expected_state) = outcome(config), unbroken[ranks]
    assert told == expected
    assert state.keys() == expected_state.keys()
    assert [name for name in state if not torch.equal(state[name], expected_state[name])] == []
    for committed, resumed in commits_and_resumes(config):
        assert resumed == committed


def commits_and_resumes(config: TrainConfig) -> list[tuple[int, int]]:
    """Pair what each attempt started from with the newest commit the attempts before had told of.

    A commit that was made but not told of yet when its attempt was killed counts as well.
    """
    pairs, told = [], 0
    for entry in events(config):
        if entry["event"] == "checkpointed":
            told = max(told, entry["checkpoint"]["step"])
        if entry["event"] == "resumed":
            pairs.append((max(told, entry["step"]), entry["step"]))
    return pairs


def test_resuming_costs_the_same_at_any_step(inputs: Path, tmp_path: Path) -> None:
    def made(steps: int) -> TrainConfig:
        training = {"max_steps": steps, "learning_rate": 1e-3, "schedule": "constant"}
        return run_config(inputs, tmp_path / str(steps), 1, training=training)

    def resumed(steps: int) -> int:
        """Go on from the last step but one, and return how many functions were called."""
        folder = tmp_path / str(steps) / "checkpoints" / f"step-{steps - 1}"
        shutil.copytree(step_path(tmp_path / "10" / "checkpoints", 10), folder)
        step = {"step": steps - 1}
        write_manifest(folder, read_manifest(folder).model_copy(update=step))
        calls = itertools.count()
        config = made(steps)
        fence = claim_folders(config, lambda: False)
        telemetry = Telemetry(config, rank=0, world_size=1)
        sys.setprofile(lambda frame, event, argument: next(calls) if event == "call" else None)
        run(config, ALONE, StopSignal(), telemetry, fence)
        sys.setprofile(None)
        telemetry.close()
        assert [entry["step"] for entry in events(config) if entry["event"] == "step"] == [steps]
        return next(calls)

    telemetry = Telemetry(made(10), rank=0, world_size=1)
    run(made(10), ALONE, StopSignal(), telemetry, claim_folders(made(10), lambda: False))
    telemetry.close()
    assert resumed(100_001) < 1.1 * resumed(11)

"""A job resumes with another number of ranks: the same data at each step, the same numbers."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import ExitCode, Progress, TrainConfig
from finetune_trainer.data.plan import DataPlan
from finetune_trainer.data.sequences import prepare
from finetune_trainer.failpoints import ENV_FAILPOINT
from finetune_trainer.model.load import load_tokenizer
from support.launch.forked_ranks import attempt, events, numbers
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs

STEPS = 8
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run_config(
    inputs: Path, folder: Path, ranks: int, strategy: str, *, is_continued: bool = False
) -> TrainConfig:
    folder.mkdir(exist_ok=True)
    return train_config(
        folder,
        world={"nproc_per_node": ranks},
        model={"path": str(inputs / "model")},
        data={
            "train": {"path": str(inputs / "train.jsonl")},
            "eval_share": 0.2,
            "max_seq_len": 64,
        },
        strategy=strategy_of(strategy, ranks),
        training={"max_steps": STEPS},
        checkpoint={"is_continued": is_continued},
    )


def strategy_of(name: str, ranks: int) -> dict[str, Any]:
    """Return a strategy; hybrid has two replicas if there are enough ranks."""
    if name == "hybrid":
        return {"type": "fsdp", "replicas": 2 if ranks == 4 else 1}
    return {"type": name}


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = run_config(inputs, tmp_path_factory.mktemp("unbroken"), 1, "ddp")
    assert attempt(config) == [0]
    return config


def losses(config: TrainConfig) -> dict[int, float]:
    return {step: values[0] for step, values in numbers(config)["steps"].items()}


def evaluations(config: TrainConfig) -> dict[int, float]:
    return numbers(config)["evaluations"]


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("strategy", "worlds"),
    [
        pytest.param("ddp", (1, 2, 4, 2, 1), id="ddp"),
        pytest.param("fsdp", (2, 4, 2, 1), id="fsdp", marks=pytest.mark.full),
        pytest.param("hybrid", (4, 2, 4), id="fsdp with replicas", marks=pytest.mark.full),
    ],
)
def test_ranks_may_come_and_go_between_attempts(
    strategy: str,
    worlds: tuple[int, ...],
    inputs: Path,
    unbroken: TrainConfig,
    tmp_path: Path,
) -> None:
    """Each attempt but the last is told to stop, and leaves one or two steps later."""
    for turn, ranks in enumerate(worlds[:-1]):
        config = run_config(inputs, tmp_path / "run", ranks, strategy, is_continued=turn > 0)
        stop = f"before-optimizer@{1 + 2 * turn}:rank=0:SIGTERM"
        assert attempt(config, {ENV_FAILPOINT: stop}) == [ExitCode.PREEMPTED] * ranks
    config = run_config(inputs, tmp_path / "run", worlds[-1], strategy, is_continued=True)
    assert attempt(config) == [0] * worlds[-1]

    resumed = [entry["step"] for entry in events(config) if entry["event"] == "resumed"]
    assert len(resumed) == len(worlds) - 1
    assert resumed == sorted(set(resumed))
    assert losses(config) == pytest.approx(losses(unbroken), abs=TOLERANCE)
    assert evaluations(config) == pytest.approx(evaluations(unbroken), abs=TOLERANCE)
    assert [*evaluations(config)] == [0, STEPS]
    progress = Progress.read(Path(config.run_dir) / "progress.json")
    assert not [text for text in progress.warnings if "held-out rows have changed" in text]


def test_every_world_trains_on_the_same_samples_at_each_step(inputs: Path, tmp_path: Path) -> None:
    config = run_config(inputs, tmp_path / "run", 1, "ddp")
    dataset = prepare(config.data, config.data.sources, load_tokenizer(config.model))
    plan = DataPlan.of(dataset, config)
    for step in range(STEPS):
        for world_size in (1, 2, 4):
            shares = [plan.rank_packs(step, rank, world_size) for rank in range(world_size)]
            packs = itertools.chain.from_iterable(itertools.chain.from_iterable(shares))
            assert sorted(packs) == sorted(plan.packs(step))

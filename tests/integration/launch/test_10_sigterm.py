"""SIGTERM in any phase: all ranks leave together, nothing is lost, the next attempt goes on."""

import os
import threading
from pathlib import Path

import pytest
import torch

from finetune_trainer.checkpoint.commit import ledger
from finetune_trainer.config import (
    ControlConfig,
    ExitCode,
    FailureClass,
    StrategyConfig,
    TrainConfig,
)
from finetune_trainer.control import StopSignal
from finetune_trainer.errors import Preempted
from finetune_trainer.failpoints import ENV_FAILPOINT, ENV_FAILPOINT_ONCE
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.checkpoint.checkpoint_fixtures import step_path
from support.launch.forked_ranks import Ranks, attempt, events, numbers, tensors
from support.launch.launches import train_config, until
from support.launch.metadata_service import event, metadata_service
from support.launch.tiny_run import write_inputs

# What follows a signal from the thread that saves lies behind the next save, which waits for it.
STEPS = 18
BEFORE_TRAINING = (
    "tokenizing:rank=1",
    "loading:rank=0",
    "evaluating@0:rank=1",
    "answering@0:rank=0",
)
IN_TRAINING = (
    "first-step@1:rank=1",
    "saving@3:rank=1",
    "evaluating@12:rank=1",
    "before-commit@15:rank=0",
)
AFTER_TRAINING = ("answering@18:rank=0", "exporting:rank=0")
TO_ALL = ("tokenizing", "loading", "evaluating@0", "mid-accumulation@2", "evaluating@6")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run_config(inputs: Path, folder: Path, ranks: int, **training: object) -> TrainConfig:
    folder.mkdir(exist_ok=True)
    steps = {"max_steps": STEPS, "learning_rate": 1e-2, "eval_every_steps": 6}
    return train_config(
        folder,
        world={"nproc_per_node": ranks},
        model={"path": str(inputs / "model")},
        data={
            "train": {"path": str(inputs / "train.jsonl")},
            "eval": {"path": str(inputs / "eval.jsonl")},
            "max_seq_len": 64,
        },
        method={"type": "lora", "lora": {"r": 4, "dropout": 0.2}},
        output={"format": "adapter"},
        training=steps | training,
        checkpoint={"every_steps": 3},
        telemetry={"sample_prompts": ["What is 1 plus 1?"]},
    )


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = run_config(inputs, tmp_path_factory.mktemp("unbroken"), 2)
    assert attempt(config) == [0, 0]
    return config


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "places",
    [
        pytest.param([(f"{place}:SIGTERM",) for place in IN_TRAINING], id="to one that trains"),
        pytest.param(
            [(f"{place}:SIGTERM",) for place in (*BEFORE_TRAINING, *AFTER_TRAINING)],
            id="to one before and after it trains",
            marks=pytest.mark.full,
        ),
        pytest.param(
            [tuple(f"{place}:rank={rank}:SIGTERM" for rank in (0, 1)) for place in TO_ALL],
            id="to all ranks",
            marks=pytest.mark.full,
        ),
    ],
)
def test_all_ranks_leave_together_and_the_next_attempt_goes_on(
    places: list[tuple[str, ...]], inputs: Path, unbroken: TrainConfig, tmp_path: Path
) -> None:
    config, marks = run_config(inputs, tmp_path / "run", 2), tmp_path / "marks"
    root = Path(config.checkpoint.dir)
    for asked in places:
        environ = {ENV_FAILPOINT: ",".join(asked), ENV_FAILPOINT_ONCE: str(marks)}
        ranks = Ranks(config, environ)
        assert ranks.codes() == [ExitCode.PREEMPTED] * 2, asked
        words = [ranks.termination(rank) for rank in (0, 1)]
        assert {word.failure_class for word in words} == {FailureClass.PREEMPTED}
        assert any("stopped by SIGTERM" in word.message for word in words)
        assert words[0].step == max([ref.step for ref in ledger(root)], default=0)
        assert set(os.listdir(marks)) >= set(asked)
    assert attempt(config) == [0, 0]

    assert numbers(config) == numbers(unbroken)
    found, expected = (
        tensors(step_path(Path(made.checkpoint.dir), STEPS)) for made in (config, unbroken)
    )
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.full
def test_no_rank_is_left_alone_while_sharded_weights_are_gathered(
    inputs: Path, tmp_path: Path
) -> None:
    config = run_config(inputs, tmp_path / "run", 2, max_steps=2)
    config = config.model_copy(update={"strategy": StrategyConfig(type="fsdp")})
    for place in ("answering@0:rank=1", "answering@0:rank=0"):
        ranks = Ranks(config, {ENV_FAILPOINT: f"{place}:SIGTERM"})
        assert ranks.codes() == [ExitCode.PREEMPTED] * 2, place


def test_tokenising_is_broken_off_at_once(inputs: Path, tmp_path: Path) -> None:
    config = run_config(inputs, tmp_path / "run", 1)
    ranks = Ranks(config, {ENV_FAILPOINT: "tokenizing:SIGTERM"})
    assert ranks.codes() == [ExitCode.PREEMPTED]
    assert ranks.termination().message == "stopped by SIGTERM without new state to save"
    assert not [event for event in events(config) if event["event"] == "data"]


def test_an_azure_event_that_one_rank_hears_of_stops_all(inputs: Path, tmp_path: Path) -> None:
    with metadata_service() as service:
        config = run_config(inputs, tmp_path / "run", 2, max_steps=10**6).model_copy(
            update={"control": ControlConfig(scheduled_events_url=service.url)}
        )
        ranks, root = Ranks(config), Path(config.checkpoint.dir)
        until(lambda: bool(ledger(root)))
        service.events = [event("Preempt", "node-1")]
        assert ranks.codes() == [ExitCode.PREEMPTED] * 2
    step = ledger(root)[0].step
    said = f"stopped by an Azure Preempt event after step {step}"
    assert ranks.termination(0).message == said
    assert ranks.termination(1).message == f"stopped by another rank after step {step}"


def test_a_save_that_does_not_fit_into_the_grace_is_not_begun(inputs: Path, tmp_path: Path) -> None:
    config = run_config(inputs, tmp_path / "run", 1, max_steps=10**6)
    fence = claim_folders(config, lambda: False)
    telemetry, stop = Telemetry(config, rank=0, world_size=1), StopSignal()

    def take_the_node_away() -> None:
        until(lambda: telemetry.progress.checkpoint is not None)
        stop.request("an Azure Preempt event", notice_seconds=0.0)

    thread = threading.Thread(target=take_the_node_away)
    thread.start()
    with pytest.raises(Preempted, match=r"by an Azure Preempt event after step \d+, too late"):
        run(config, World(0, 0, 1, torch.device("cpu")), stop, telemetry, fence)
    thread.join()
    telemetry.close()
    assert all(ref.step % 3 == 0 for ref in ledger(Path(config.checkpoint.dir)))

"""Runs by `python -m finetune_trainer` on the device: killed and resumed, sharded on one rank."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.config import ExitCode, TrainConfig
from finetune_trainer.failpoints import ENV_FAILPOINT
from support.launch.device_runs import (
    Device,
    Trained,
    device_config,
    largest_difference,
    needs_cuda,
)
from support.launch.launches import launch

pytestmark = [pytest.mark.gpu, pytest.mark.full]
STEPS = 12


def run_processes(config: TrainConfig, code: int = 0, **environ: str) -> Trained:
    """Train in processes as users do, which end with `code`."""
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    whole = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    started = launch(
        config, "finetune_trainer.rank:run", {**whole, "PYTHONWARNINGS": "default", **environ}
    )
    assert started.wait(timeout=200) == code, started.stderr
    return Trained(Path(config.run_dir).parent, 0, 0.0)


def config_of(inputs: Path, folder: Path, device: Device, **changes: Any) -> TrainConfig:
    values = {
        "method": {"type": "lora", "lora": {"r": 8, "dropout": 0.2}},
        "training": {"max_steps": STEPS, "deterministic": device == "cuda"},
        "checkpoint": {"every_steps": 4},
    }
    return device_config(inputs, folder, device, **{**values, **changes})


@pytest.fixture(scope="module")
def unbroken(inputs: Path, device: Device, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run_processes(config_of(inputs, tmp_path_factory.mktemp("unbroken"), device))


def test_a_killed_run_goes_on_with_the_same_bits(
    unbroken: Trained, inputs: Path, device: Device, tmp_path: Path
) -> None:
    config = config_of(inputs, tmp_path / "job", device)
    run_processes(config, ExitCode.KILLED, **{ENV_FAILPOINT: "after-optimizer@6"})
    resumed = run_processes(config.continued())
    assert [line["step"] for line in resumed.events("resumed")] == [4]
    assert resumed.losses[-8:] == unbroken.losses[-8:]
    assert _weights(resumed) == _weights(unbroken)


def test_sharding_on_one_rank_makes_the_losses_of_one_process(
    unbroken: Trained, inputs: Path, device: Device, tmp_path: Path
) -> None:
    config = config_of(
        inputs,
        tmp_path / "job",
        device,
        strategy={"type": "fsdp"},
        telemetry={"sample_prompts": ["What is train number 3 plus 3?"]},
    )
    sharded = run_processes(config.continued())
    assert largest_difference(sharded.losses, unbroken.losses) < 2e-2
    progress = json.loads((sharded.folder / "run" / "progress.json").read_text())
    (answered,) = progress["samples"]  # by a gathered copy: on a GPU, where there is one
    assert {"before", "after"} <= answered.keys()  # words of an untrained model, perhaps none


def test_a_sharded_base_in_4_bits_answers(inputs: Path, device: Device, tmp_path: Path) -> None:
    if torch.__version__ < "2.13":  # compares versions
        pytest.skip(f"torch {torch.__version__} cannot shard integers; the trainer needs 2.13")
    config = config_of(
        inputs,
        tmp_path / "job",
        device,
        method={"type": "qlora", "quantization": "nf4", "lora": {"r": 8}},
        strategy={"type": "fsdp"},
        training={"max_steps": 2},
        telemetry={"sample_prompts": ["What is train number 3 plus 3?"]},
    )
    answered = run_processes(config.continued())
    progress = json.loads((answered.folder / "run" / "progress.json").read_text())
    (sample,) = progress["samples"]
    assert {"before", "after"} <= sample.keys()


def test_two_ranks_make_the_losses_of_one(
    unbroken: Trained, inputs: Path, device: Device, tmp_path: Path
) -> None:
    needs_cuda(device, "two ranks of a CPU are tested in tests/integration")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL gives a rank a GPU of its own")
    world = {"nproc_per_node": 2, "device": device}
    for strategy in ("ddp", "fsdp"):
        folder = tmp_path / strategy
        config = config_of(inputs, folder, device, world=world, strategy={"type": strategy})
        trained = run_processes(config)
        assert largest_difference(trained.losses, unbroken.losses) < 2e-2
        progress = json.loads((folder / "run" / "progress.json").read_text())
        assert set(progress["transport"].split(",")) <= {"P2P", "SHM", "NET/Socket"}


def _weights(run: Trained) -> dict[str, bytes]:
    files = sorted((run.folder / "output").rglob("*.safetensors"))
    assert files
    return {str(file.relative_to(run.folder)): file.read_bytes() for file in files}

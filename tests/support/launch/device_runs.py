"""Runs of the trainer on the device of `make gpu-check`, in this process: a GPU's, or a CPU's.

`FINETUNE_TEST_DEVICE` names the device; without it, it is a GPU where there is one.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Termination, TrainConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.launch.journals import journal_in
from support.launch.launches import train_config

Device = Literal["cpu", "cuda"]
Watch = Callable[[TrainConfig, World, Telemetry, Fence], Termination]


def device_of_tests() -> Device:
    """Return the device that tests marked `gpu` are to use."""
    asked = os.environ.get("FINETUNE_TEST_DEVICE") or ""
    if asked not in ("", "cpu", "cuda"):
        raise ValueError(f"FINETUNE_TEST_DEVICE is {asked!r}; use cpu or cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("FINETUNE_TEST_DEVICE is cuda, and torch sees no GPU here")
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def needs_cuda(device: Device, why: str) -> None:
    """Skip the test on a CPU, and say why."""
    if device == "cpu":
        pytest.skip(f"needs a GPU: {why}")


@dataclass(frozen=True)
class Trained:
    """What one run left behind.

    Attributes:
        peak_bytes: Of the allocator, from the start of the run; 0 on a CPU, whose has none.
        seconds: Of the whole run.
    """

    folder: Path
    peak_bytes: int
    seconds: float

    @cached_property
    def journal(self) -> list[dict[str, Any]]:
        """The lines of its journal."""
        return journal_in(self.folder / "run")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of one kind."""
        return [line for line in self.journal if line["event"] == name]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [line["loss"] for line in self.events("step")]

    @property
    def warnings(self) -> list[str]:
        """Everything it warned of."""
        return [line["message"] for line in self.events("warning")]


def device_config(inputs: Path, folder: Path, device: Device, **changes: Any) -> TrainConfig:
    """Return the configuration of a run on `inputs`, which keeps everything below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "job": {"name": folder.name, "uid": f"u-{folder.name}"},
        "world": {"nproc_per_node": 1, "device": device},
        "model": {"path": str(inputs / "model")},
        "data": {
            "train": {"path": str(inputs / "train.jsonl")},
            "cache_dir": str(inputs / "cache"),
            "max_seq_len": 128,
        },
        "training": {"precision": "bf16"},
        "telemetry": {"gpu_metrics": "none"},
    }
    for name, value in changes.items():
        known = values.get(name)
        values[name] = {**known, **value} if isinstance(known, dict) else value
    if values.get("method", {}).get("type", "full") != "full":
        values.setdefault("output", {"format": "adapter"})
    return train_config(folder, **values)


def train(config: TrainConfig, watch: Watch | None = None) -> Trained:
    """Do a rank's work in this process, up to the export.

    `watch` does it in place of `rank.run`, to look at it.
    """
    device = torch.device(config.world.device, *([0] if config.world.device == "cuda" else []))
    world = World(rank=0, local_rank=0, world_size=1, device=device)
    fence = claim_folders(config, lambda: False)
    began = time.perf_counter()
    if device.type == "cuda":
        gc.unfreeze()  # the run before has frozen its model, whose tensors would count
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with closing(Telemetry(config, rank=0, world_size=1)) as telemetry:
        if watch is None:
            run(config, world, StopSignal(), telemetry, fence)
        else:
            watch(config, world, telemetry, fence)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Trained(Path(config.run_dir).parent, peak, time.perf_counter() - began)


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses."""
    assert found
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))

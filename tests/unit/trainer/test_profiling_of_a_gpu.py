"""Profiles of a GPU, shown with stand-ins for CUDA's functions: NVTX ranges and memory snapshots.

The GPU's kernels in a trace are shown by tests/gpu.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import finetune_trainer.profiling
from finetune_trainer.config import TrainConfig
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.profiling import Profiler, record_memory_history
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.launch.launches import train_config

GPU = World(rank=0, local_rank=0, world_size=1, device=torch.device("cuda", 0))


class Cuda:
    """The calls of CUDA's functions, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.history: dict[str, Any] = {}
        for module, name in (
            (torch.cuda.profiler, "start"),
            (torch.cuda.profiler, "stop"),
            (torch.cuda.nvtx, "range_push"),
            (torch.cuda.nvtx, "range_pop"),
        ):
            monkeypatch.setattr(module, name, self._noting(name))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self._dump)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)

    def _noting(self, name: str) -> Any:
        return lambda *words: self.calls.append(" ".join((name, *map(str, words))))

    def _dump(self, path: str) -> None:
        Path(path).write_bytes(b"segments")

    def _record(self, **settings: Any) -> None:
        self.history = settings


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.fixture
def activities(monkeypatch: pytest.MonkeyPatch) -> list[set[ProfilerActivity]]:
    """The activities of each profiler; the GPU's are left out, because there is none."""
    found = []

    def on_the_cpu(activities: list[ProfilerActivity], **settings: Any) -> profile:
        found.append(set(activities))
        return profile(activities=[ProfilerActivity.CPU], **settings)

    monkeypatch.setattr(finetune_trainer.profiling, "profile", on_the_cpu)
    return found


def gpu_config(folder: Path, **settings: Any) -> TrainConfig:
    wanted = {"first_step": 2, "last_step": 3, **settings}
    world = {"nproc_per_node": 1, "device": "cuda"}
    return train_config(folder, world=world, telemetry={"profile": wanted})


def run_steps(config: TrainConfig, steps: int) -> Path:
    """Run steps of two phases with a profiler, and return the folder of the profile."""
    telemetry = Telemetry(config, rank=0, world_size=1)
    profiler = Profiler(config, GPU, telemetry)
    for step in range(1, steps + 1):
        profiler.begin_step(step)
        telemetry.phases.enter(TimedPhase.FORWARD)
        telemetry.phases.enter(TimedPhase.OTHER)
        profiler.end_step(step)
    profiler.finish()
    telemetry.close()
    report = telemetry.progress.profile
    assert report is not None
    assert report.error is None
    return Path(report.path)


def nested(calls: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the open NVTX ranges whenever one begins."""
    ranges: list[str] = []
    for call in calls:
        name, _, label = call.partition(" ")
        if name == "range_push":
            ranges.append(label)
            yield tuple(ranges)
        elif name == "range_pop":
            ranges.pop()
    assert ranges == []


def test_nsight_gets_the_steps_with_their_phases_and_the_gpu(
    cuda: Cuda, activities: list[set[ProfilerActivity]], tmp_path: Path
) -> None:
    folder = run_steps(gpu_config(tmp_path, nvtx=True), 4)
    assert (cuda.calls[0], cuda.calls[-1]) == ("start", "stop")
    assert list(nested(cuda.calls[1:-1])) == [
        path
        for step in ("ProfilerStep#2", "ProfilerStep#3")
        for path in ((step,), (step, "other"), (step, "forward"), (step, "other"))
    ]
    assert activities == [{ProfilerActivity.CPU}]
    assert [one.name for one in folder.iterdir()] == ["rank-0.json.gz"]


def test_a_trace_has_the_gpu_and_a_memory_snapshot_only_if_it_is_configured(
    cuda: Cuda, activities: list[set[ProfilerActivity]], tmp_path: Path
) -> None:
    for is_on in (False, True):
        (tmp_path / str(is_on)).mkdir()
        config = gpu_config(tmp_path / str(is_on), memory=is_on)
        record_memory_history(config)
        folder = run_steps(config, 4)
        assert (folder / "rank-0.memory.pickle").exists() == is_on
        assert bool(cuda.history) == is_on
    assert activities == [{ProfilerActivity.CPU, ProfilerActivity.CUDA}] * 2
    assert cuda.calls == []
    # C++ stacks take minutes to write, and a history without limit fills the host's memory.
    assert cuda.history == {"stacks": "python", "max_entries": 100_000}

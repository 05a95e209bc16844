"""What is told of a device is so: phases, the driver's numbers, NCCL's recorder, and their cost."""

import gzip
import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Phase, Termination, TrainConfig
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.control import StopSignal
from finetune_trainer.gpu import CudaClock, find_gpu, free_memory
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.telemetry.collectives.dump import Recorded, read_dump
from finetune_trainer.telemetry.collectives.flight_recorder import enable_timing, recorder_of_nccl
from finetune_trainer.telemetry.node.gpus import Gpus
from finetune_trainer.world import World
from support.launch.device_runs import Device, device_config, needs_cuda, train
from support.launch.launches import until

pytestmark = pytest.mark.gpu
COUNTED = (TimedPhase.FORWARD, TimedPhase.BACKWARD, TimedPhase.OPTIMIZER)


def test_phases_have_the_time_of_the_device(inputs: Path, device: Device, tmp_path: Path) -> None:
    told: dict[TimedPhase, float] = {}
    measured: defaultdict[TimedPhase, float] = defaultdict(float)

    def watch(config: TrainConfig, world: World, telemetry: Telemetry, fence: Fence) -> Termination:
        phases, marks, is_training = telemetry.phases, list[tuple[TimedPhase, Any]](), False
        enter, tell, before = phases.enter, telemetry.phase, dict[TimedPhase, float]()

        def entered(phase: TimedPhase) -> TimedPhase:
            last = enter(phase)
            if is_training:
                marks.append((phase, _mark(device)))
            return last

        def phase_of_run(phase: Phase) -> None:
            nonlocal is_training
            tell(phase)
            is_training = phase is Phase.TRAINING
            if is_training:
                before.update({one: phases.spent(one) for one in COUNTED})

        phases.enter = entered  # type: ignore[method-assign]
        telemetry.phase = phase_of_run  # type: ignore[method-assign]
        ended = run(config, world, StopSignal(), telemetry, fence)
        for (one, began), (_, over) in pairwise(marks):
            measured[one] += _seconds(device, began, over)
        told.update({one: phases.spent(one) - before[one] for one in COUNTED})
        return ended

    train(device_config(inputs, tmp_path / "job", device, training={"max_steps": 20}), watch)
    for phase in COUNTED:
        assert told[phase] == pytest.approx(measured[phase], rel=0.1, abs=0.005), phase


def test_a_profile_shows_the_kernels_and_the_memory_of_the_gpu(
    inputs: Path, device: Device, tmp_path: Path
) -> None:
    wanted = {"first_step": 3, "last_step": 4, "memory": device == "cuda"}
    config = device_config(
        inputs, tmp_path / "job", device, training={"max_steps": 6}, telemetry={"profile": wanted}
    )
    try:
        train(config)
    finally:
        if device == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)  # it would slow other tests down
    folder = Path(config.run_dir) / "profiles" / "attempt-1-steps-3-4"
    with gzip.open(folder / "rank-0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {one["name"] for one in events if one.get("cat") == "user_annotation"}
    assert names >= {"ProfilerStep#3", "ProfilerStep#4", "forward", "backward", "optimizer"}
    assert any(one.get("cat") == "kernel" for one in events) == (device == "cuda")
    assert (folder / "rank-0.memory.pickle").exists() == (device == "cuda")


def _mark(device: Device) -> Any:
    return CudaClock().mark() if device == "cuda" else time.monotonic()


def _seconds(device: Device, began: Any, over: Any) -> float:
    if device == "cpu":
        return float(over - began)
    torch.cuda.synchronize()
    return CudaClock().seconds(began, over)


def test_a_mark_in_the_stream_costs_the_host_microseconds(device: Device) -> None:
    needs_cuda(device, "a CPU has no stream to mark")
    clock, seconds = CudaClock(), []
    for _ in range(200):
        began = time.perf_counter()
        clock.mark()
        seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 20e-6


def test_what_the_allocator_keeps_for_later_is_free(device: Device) -> None:
    needs_cuda(device, "a CPU's allocator keeps nothing")
    gpu = torch.device(device, 0)
    kept = torch.empty(2**28, dtype=torch.uint8, device=gpu)
    del kept
    free, _ = torch.cuda.mem_get_info(gpu)
    assert free_memory(gpu) >= free + 2**28


def test_the_page_of_a_node_says_what_nvidia_smi_says(device: Device) -> None:
    needs_cuda(device, "there is no driver to ask")
    gpu = find_gpu(torch.device(device, 0))
    assert gpu is not None
    fields = "memory.total,memory.used,power.limit,temperature.gpu,clocks.mem"
    asked = ["nvidia-smi", f"--id={gpu.uuid}", f"--query-gpu={fields}"]
    done = subprocess.run([*asked, "--format=csv,noheader,nounits"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nvidia-smi does not answer here: {done.stdout}{done.stderr}")
    total, used, limit, celsius, clock = map(float, done.stdout.split(","))
    warnings: list[str] = []
    gpus = Gpus(warnings.append, seconds=0.5)
    try:
        until(lambda: gpu.uuid in gpus.render().decode(), timeout=60)
        page = _page(gpus.render().decode(), gpu.uuid)
    finally:
        gpus.process.kill()
    assert page["finetune_gpu_memory_bytes total"] == pytest.approx(total * 2**20, rel=0.01)
    assert page["finetune_gpu_memory_bytes used"] == pytest.approx(used * 2**20, abs=2**30)
    assert page["finetune_gpu_power_limit_watts"] == pytest.approx(limit, rel=0.01)
    assert page["finetune_gpu_temperature_celsius core"] == pytest.approx(celsius, abs=8)
    assert page["finetune_gpu_clock_hertz memory"] == pytest.approx(clock * 1e6, rel=0.5)
    assert warnings == []


def _page(text: str, uuid: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = {name: value for name, value in sample.labels.items() if name != "gpu"}
            if sample.labels.get("gpu") == uuid:
                found[" ".join((sample.name, *rest.values()))] = sample.value
    return found


def test_the_recorder_of_nccl_is_understood(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_cuda(device, "torch's flight recorder is NCCL's")
    without = _all_reduce(1000, 2**20)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "0")  # restored after the test
    enable_timing()
    timed = _all_reduce(1000, 2**20)
    for found in (without, timed):
        newest = found.recorded[-1]
        assert (newest.op, newest.num_ranks, newest.num_bytes) == ("all_reduce", 1, 4 * 2**20)
        assert newest.is_over
    assert without.recorded[-1].seconds is None
    assert timed.recorded[-1].seconds is not None
    assert timed.seconds - without.seconds < 50e-6  # of one collective, with its two more events


class _Reduced:
    def __init__(self, seconds: float, recorded: list[Recorded]) -> None:
        self.seconds, self.recorded = seconds, recorded


def _all_reduce(count: int, size: int) -> _Reduced:
    """Reduce on a group of one rank; return the seconds of one, and what was recorded."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    dist.init_process_group(
        "nccl",
        store=HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    try:
        values = torch.ones(size, device="cuda")
        # torch records the ranks of the first default group of a process only.
        group = dist.new_group([0])

        def work(times: int) -> None:
            for _ in range(times):
                dist.all_reduce(values, group=group)
            torch.cuda.synchronize()

        work(10)
        seconds = _seconds_of(lambda: work(count)) / count
        until(lambda: list(read_dump(recorder_of_nccl()(True)).collectives)[-1].is_over, timeout=30)
        return _Reduced(seconds, list(read_dump(recorder_of_nccl()(True)).collectives))
    finally:
        dist.destroy_process_group()


def _seconds_of(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

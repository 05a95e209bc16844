"""A rank's own work, watched: when the device ends each step, what memory it took, its idle time.

Stands for `finetune_trainer.rank:run` (`ENTRY` of the launcher) and ends the run where training
ends, as nobody wants the model. Writes `measured.json` into the run's folder.
"""

import gzip
import json
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_bench.rows import WARM_UP
from torch.profiler import ProfilerActivity, profile, schedule

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import ExitCode, FailureClass, Phase, Termination, TrainConfig
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.control import StopSignal
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.rank import run
from finetune_trainer.sizing.method import with_method
from finetune_trainer.sizing.peak import step_peak
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class _TrainedError(Exception):
    """Training is over; what comes after it is not measured."""


class _Watch:
    """Follows one run by what it tells of itself."""

    def __init__(self, world: World, telemetry: Telemetry) -> None:
        self._device = world.device
        self._is_cuda = world.device.type == "cuda"
        self._ends: list[Any] = []
        self._at_start: dict[str, int] = {}
        self._after_step: list[Callable[[], None]] = []
        self._enter, self._tell = telemetry.phases.enter, telemetry.phase
        # The loop enters this phase once a step, when everything of the step is in the stream.
        telemetry.phases.enter = self._entered  # type: ignore[method-assign]
        telemetry.phase = self._phase  # type: ignore[method-assign]

    def also(self, after_step: Callable[[], None]) -> None:
        """Call this at the end of each step."""
        self._after_step.append(after_step)

    def _entered(self, phase: TimedPhase) -> TimedPhase:
        before = self._enter(phase)
        if phase is TimedPhase.LOGGING:
            self._ends.append(self._mark())
            for call in self._after_step:
                call()
        return before

    def _phase(self, phase: Phase) -> None:
        if phase is Phase.TRAINING and not self._at_start:
            self._at_start = self._memory()
        if phase in (Phase.ANSWERING, Phase.EXPORTING) and self._ends:
            raise _TrainedError
        self._tell(phase)

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _memory(self) -> dict[str, int]:
        if not self._is_cuda:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return {"host_peak_bytes": most}
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return {
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            "outside_allocator_bytes": total - free - reserved,
        }

    def measured(self) -> dict[str, Any]:
        """Return seconds of the steps after the warm-up, and memory; waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        seconds = [
            one.elapsed_time(other) / 1000 if self._is_cuda else other - one
            for one, other in pairwise(self._ends[WARM_UP - 1 :])
        ]
        return {
            "step_seconds": seconds,
            "at_start": self._at_start,
            "at_end": self._memory(),
        }


def measure(
    config: TrainConfig,
    world: World,
    stop: StopSignal,
    telemetry: Telemetry,
    fence: Fence | None,
) -> Termination:
    """Do the work of `rank.run` up to the end of training, and write what was seen."""
    return _watched(config, world, stop, telemetry, fence, is_profiled=False)


def idle(
    config: TrainConfig,
    world: World,
    stop: StopSignal,
    telemetry: Telemetry,
    fence: Fence | None,
) -> Termination:
    """Do the same under the profiler, and write the share of time in which no kernel ran."""
    return _watched(config, world, stop, telemetry, fence, is_profiled=True)


def _watched(
    config: TrainConfig,
    world: World,
    stop: StopSignal,
    telemetry: Telemetry,
    fence: Fence | None,
    *,
    is_profiled: bool,
) -> Termination:
    watch, folder = _Watch(world, telemetry), Path(config.run_dir)
    is_cuda = world.device.type == "cuda"
    trace = folder / "trace.json.gz"
    with ExitStack() as profiling:
        if is_profiled:
            # Of the host nothing is noted on a GPU: that would slow it down, and make idle time.
            kinds = [ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]
            steps = schedule(wait=WARM_UP, warmup=2, active=4, repeat=1)
            made = profile(
                activities=kinds,
                schedule=steps,
                on_trace_ready=lambda done: done.export_chrome_trace(str(trace)),
            )
            watch.also(profiling.enter_context(made).step)
        try:
            termination = run(config, world, stop, telemetry, fence)
        except _TrainedError:
            termination = Termination(
                failure_class=FailureClass.COMPLETED, exit_code=ExitCode.DONE, message="measured"
            )
    result = watch.measured() | {
        "formula_bytes": step_peak(with_method(read_base_of(config), config), config).nbytes
    }
    if is_profiled:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        result["idle_share"] = idle_share(events, _ON_DEVICE if is_cuda else ("cpu_op",))
    (folder / "measured.json").write_text(json.dumps(result))
    return termination


def idle_share(events: Iterable[dict[str, Any]], kinds: tuple[str, ...]) -> float:
    """Return the share of the time from the first to the last event of `kinds` in which none ran.

    `events` are those of a Chrome trace.

    Raises:
        ValueError: there are none.
    """
    work = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds)
    if not work:
        raise ValueError(f"the trace has no events of {', '.join(kinds)}")
    began = at = work[0][0]
    busy = 0.0
    for start, end in work:
        busy += max(0.0, end - max(start, at))
        at = max(at, end)
    return float(1 - busy / (at - began))

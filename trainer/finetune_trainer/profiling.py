"""Record torch.profiler traces of a few steps, with the trainer's phases as ranges.

All ranks agree on the steps; the chosen ranks record them. The others wait while a profiler starts
or stops, so these times belong to no step. Files of a rank R:

    RUN_DIR/profiles/attempt-N-steps-A-B/rank-R.json.gz         open it with ui.perfetto.dev
    RUN_DIR/profiles/attempt-N-steps-A-B/rank-R.memory.pickle   with `memory`
"""

import gzip
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from finetune_trainer.config import ProfileConfig, ProfileReport, TrainConfig
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.errors import ConfigError
from finetune_trainer.files import move_file
from finetune_trainer.gpu import write_memory_snapshot
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World

_SPARES_SPACE = 4  # gzip's level; a trace shrinks to 4 % of its size, a higher level adds little

_MOST_ALLOCATIONS = 100_000
# torch holds the interpreter lock while it ends and writes a trace, for about a second per 50,000
# operators. The rank's heartbeat needs that lock, so a trace is limited and the heartbeat may stop.
_MOST_MICRO_BATCHES = 64
_SILENT_SECONDS = 900.0
_SECONDS_TO_COMPRESS = 10.0  # after a stop or an error


class _Window(NamedTuple):
    """Steps to profile, counted from 1, both included."""

    first: int
    last: int


class Profiler:
    """Profiles of one rank; the loop calls it around each step."""

    def __init__(self, config: TrainConfig, world: World, telemetry: Telemetry) -> None:
        """Plan the steps that the configuration names, if any."""
        wanted = config.telemetry.profile
        self._settings = wanted or ProfileConfig(first_step=1, last_step=1)
        self._config, self._world, self._telemetry = config, world, telemetry
        self._planned = _Window(wanted.first_step, wanted.last_step) if wanted else None
        self._next = self._planned
        self._began: int | None = None  # first step of the window that is open
        self._trace: _Trace | None = None
        self._exporting: Thread | None = None

    @property
    def is_recording(self) -> bool:
        """Whether any rank records the current step."""
        return self._began is not None

    def _limited(self, window: _Window) -> _Window:
        """Return the window, shortened to as many micro-batches as a trace can hold."""
        steps = max(1, _MOST_MICRO_BATCHES // self._config.gradient_accumulation_steps)
        return window._replace(last=min(window.last, window.first + steps - 1))

    def check(self, first_step: int, total_steps: int) -> None:
        """Compare the planned steps with the steps of this attempt.

        Args:
            first_step: First step of this attempt, counted from 0.
            total_steps: Steps of the run.

        Raises:
            ConfigError: A new run ends before them.
        """
        if self._planned is None:
            return
        first, last = self._planned
        steps = f"spec.observability.profile.steps {first}-{last}"
        if last > total_steps:
            message = f"{steps}: the run has only {total_steps} steps; choose earlier ones"
            if first_step == 0:
                raise ConfigError(message)
            self._warn(message)
        elif last <= first_step:
            self._next = None
            known = Path(self._config.run_dir) / "profiles"
            if any(known.glob(f"attempt-*-steps-{first}-{last}")):
                return  # an earlier attempt has recorded them
            self._warn(
                f"{steps}: no step is profiled, because this attempt resumes after step "
                f"{first_step}; choose later ones, or use ftctl profile"
            )

    def request(self, first: int, steps: int, total_steps: int) -> None:
        """Profile `steps` steps from step `first`; called with the same values on every rank."""
        last = min(first + steps - 1, total_steps)
        if self.is_recording:
            return  # the planned steps have just begun; the end of these accepts the next request
        if last < first:
            self._telemetry.profile_requests.end()
        else:
            self._next = _Window(first, last)

    def begin_step(self, step: int) -> None:
        """Start to record if a window begins with step `step`, counted from 1; a collective."""
        if self._next is None or step < self._next.first:
            return
        if not self.is_recording:
            if self._next is self._planned:
                self._planned = None
            self._next = self._limited(self._next._replace(first=step))
            self._open(step)
        if self._trace is not None:
            self._trace.begin_step(step)

    def end_step(self, step: int, *, is_last: bool = False) -> None:
        """Stop to record if a window ends with this step, or the training does; a collective."""
        if self._began is None or self._next is None:
            return
        if is_last or step >= self._next.last:
            self._close(self._began, step)
            self._next = None if is_last else self._next

    def finish(self) -> None:
        """Wait until the last profile is written."""
        if self._exporting is not None:
            self._exporting.join()
        if self._planned is not None and self._next == self._planned:
            first, last = self._planned
            self._warn(f"steps {first} to {last} were not profiled: training ended before")

    def leave(self, seconds: float) -> None:
        """End with an error, at most `seconds` later: a trace that is not written then is lost."""
        if self._exporting is not None:
            self._exporting.join(max(0.0, min(seconds, _SECONDS_TO_COMPRESS)))
            with suppress(OSError):
                profiles = Path(self._config.run_dir) / "profiles"
                own = f"attempt-{self._config.job.attempt}-*/.rank-{self._world.rank}.json*"
                for left in profiles.glob(own):
                    left.unlink()
        if self.is_recording:
            self._warn(f"the profile from step {self._began} is lost: training ended before")

    def _open(self, step: int) -> None:
        telemetry, error = self._telemetry, None
        with telemetry.phases.within(TimedPhase.PROFILING):
            if self._world.rank in self._settings.ranks:
                if self._exporting is not None:
                    self._exporting.join()  # the previous profile of this rank
                try:
                    self._trace = _Trace(self._settings, telemetry, self._world.device)
                except Exception as raised:  # of torch or CUDA; training does not need a profile
                    error = _reason(raised)
            telemetry.profile_requests.begin()
            telemetry.is_recording_profile = True
            self._began = step
            self._world.liveness_barrier(_SILENT_SECONDS)
        if error is not None:
            telemetry.warn(f"steps from {step} are not profiled ({error}); training continues")
        if self._trace is not None:
            self._trace.follow_phases()

    def _close(self, first: int, last: int) -> None:
        name = f"attempt-{self._config.job.attempt}-steps-{first}-{last}"
        folder = Path(self._config.run_dir) / "profiles" / name
        report = ProfileReport(first_step=first, last_step=last, path=str(folder))
        trace, self._trace = self._trace, None
        self._began, self._telemetry.is_recording_profile = None, False
        self._next = self._planned if self._planned and self._planned.last > last else None
        if trace is not None:
            trace.end_ranges()
        with self._telemetry.phases.within(TimedPhase.PROFILING):
            if trace is not None:
                report = self._save(trace, folder, report)
            self._world.liveness_barrier(_SILENT_SECONDS)
        if trace is None or report.error is not None:
            if trace is not None or self._world.is_main:
                self._telemetry.profiled(report)
            return
        self._exporting = Thread(target=self._compress, args=(folder, report), name="profile")
        self._exporting.daemon = True
        self._exporting.start()

    def _save(self, trace: "_Trace", folder: Path, report: ProfileReport) -> ProfileReport:
        """Stop the trace and write it uncompressed; the report contains the error, if any."""
        try:
            trace.stop()
            folder.mkdir(parents=True, exist_ok=True)
            if self._settings.memory:
                write_memory_snapshot(folder / f"rank-{self._world.rank}.memory.pickle")
            trace.save(self._uncompressed(folder))
        except Exception as error:  # of torch, CUDA or the disk; training does not need a profile
            with suppress(OSError):
                for left in folder.glob(f".rank-{self._world.rank}.json*"):
                    os.truncate(left, 0)  # torch keeps its partial file open, which takes space
                    left.unlink()
            return report.model_copy(update={"error": _reason(error)})
        return report

    def _compress(self, folder: Path, report: ProfileReport) -> None:
        """Compress the saved trace, in a thread: zlib does not hold the interpreter lock."""
        path, source = folder / f"rank-{self._world.rank}.json.gz", self._uncompressed(folder)
        partial = path.with_name(f".{path.name}.partial")
        try:
            with source.open("rb") as text, gzip.open(partial, "wb", _SPARES_SPACE) as file:
                shutil.copyfileobj(text, file, 1 << 20)
            move_file(partial, path)
        except Exception as error:  # full disk or no memory; training does not need a profile
            report = report.model_copy(update={"error": _reason(error)})
        with suppress(OSError):
            for left in (source, partial):
                left.unlink(missing_ok=True)
        self._telemetry.profiled(report)

    def _uncompressed(self, folder: Path) -> Path:
        return folder / f".rank-{self._world.rank}.json"

    def _warn(self, sentence: str) -> None:
        if self._world.is_main:
            self._telemetry.warn(sentence)


class _Trace:
    """A recording of this rank, which begins with this object."""

    def __init__(self, settings: ProfileConfig, telemetry: Telemetry, device: torch.device) -> None:
        self._uses_nvtx = settings.nvtx
        self._phases = telemetry.phases
        self._step, self._phase = ExitStack(), ExitStack()
        activities = [ProfilerActivity.CPU]
        # Only one tool can record a GPU: with nvtx it is Nsight Systems.
        if device.type == "cuda" and not settings.nvtx:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, with_stack=settings.stacks)
        self._profile.start()
        if self._uses_nvtx:
            torch.cuda.profiler.start()

    def follow_phases(self) -> None:
        """Show each phase as a range from now on."""
        self._phases.listen(self._enter_phase)

    def begin_step(self, step: int) -> None:
        """Begin the range of a step, in the current phase."""
        self._phase.close()  # before the step, which contains it
        self._step.close()
        # The name by which TensorBoard's plug-in and HTA recognise steps.
        self._step = self._range(f"ProfilerStep#{step}")
        self._enter_phase(self._phases.phase)

    def end_ranges(self) -> None:
        """End the ranges of step and phase."""
        self._phases.listen(None)
        self._phase.close()
        self._step.close()

    def stop(self) -> None:
        """Stop to record; on a GPU this waits for its work."""
        if self._uses_nvtx:
            torch.cuda.profiler.stop()
        self._profile.stop()

    def save(self, path: Path) -> None:
        """Write the trace as JSON. torch holds the interpreter lock until it is written.

        Raises:
            OSError: torch could not write it; torch itself only logs that.
        """
        self._profile.export_chrome_trace(str(path))
        with path.open("rb") as file:
            file.seek(-min(16, path.stat().st_size), 2)
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"{path} is incomplete; the disk may be full")
        self._profile.profiler = None  # in a reference cycle, which would retain the trace

    def _enter_phase(self, phase: TimedPhase) -> None:
        self._phase.close()
        self._phase = self._range(phase.value)

    def _range(self, name: str) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(record_function(name))
        if self._uses_nvtx:
            stack.enter_context(torch.cuda.nvtx.range(name))
        return stack


def record_memory_history(config: TrainConfig) -> None:
    """Record the Python stack of each GPU memory allocation from now on, if that is configured.

    At most 100,000 are recorded, the newest. C++ stacks would take minutes to write.
    """
    profile_config = config.telemetry.profile
    if profile_config is not None and profile_config.memory:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ALLOCATIONS)


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"torch could not write {error.filename}; the disk may be full"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

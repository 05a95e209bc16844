"""Run one rank, from its first instruction to its exit code.

The supervisor starts `python -m finetune_trainer.launch.worker CONFIG ENTRY` once per process;
under another launcher `main` calls `run_rank` itself. ENTRY (`finetune_trainer.rank:run`) does the
work; this module provides its world and reports its end.
"""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import ExitCode, FailureClass, Phase, Termination, TrainConfig
from finetune_trainer.config.log_folders import free_generation
from finetune_trainer.control import StopSignal, Verdict, guard, leave
from finetune_trainer.determinism import deterministic
from finetune_trainer.errors import (
    ClaimLostError,
    ConfigError,
    OutputNotWritableError,
    OvertakenError,
)
from finetune_trainer.garbage import gc_paused
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.launch.cuda_environment import cuda_environment
from finetune_trainer.launch.page_address import distribute_page_address
from finetune_trainer.launch.rank_report import (
    DEFAULT_ENTRY,
    ENV_REPORT_DIR,
    ENV_STARTED,
    ENV_SUPERVISOR_PID,
    RankReport,
    write_report,
)
from finetune_trainer.launch.stacks import stacks_file
from finetune_trainer.launch.termination_message import preempted_before_training, with_progress
from finetune_trainer.launchers import ACCELERATE, Launch, read_launch, restart_count
from finetune_trainer.links import check_links
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.telemetry.collectives.flight_recorder import enable_timing
from finetune_trainer.telemetry.collectives.transport import delete_log
from finetune_trainer.telemetry.node.start_page import page_without_supervisor
from finetune_trainer.telemetry.shared import ENV_NODE_PAGE, NodePage, Shared
from finetune_trainer.unused_packages import hide_unused
from finetune_trainer.watchdog import limit_of, watch_progress
from finetune_trainer.with_parent import end_with_parent
from finetune_trainer.world import World, gather_values, open_world

# Time for all ranks to leave at their next step boundary after they were overtaken. After it rank 0
# leaves alone, which ends the others. With the time between two checks the sum is below 10 s.
_SECONDS_TO_LEAVE_TOGETHER = 3.0
_closing = threading.Lock()

Entry = Callable[[TrainConfig, World, StopSignal, Telemetry, Fence | None], Termination]


def main() -> NoReturn:
    """Run as a supervised rank: do the work, leave a report, exit with its code."""
    config_path, entry = sys.argv[1:]
    # An orphaned rank would write to the same checkpoints as the next attempt.
    end_with_parent(int(os.environ[ENV_SUPERVISOR_PID]), signal.SIGKILL)
    report_end = partial(write_report, Path(os.environ[ENV_REPORT_DIR]))
    config = TrainConfig.read(Path(config_path))
    hide_unused(config)
    report = run_rank(config, entry, report_end=report_end)
    report_end(report)
    leave(report.termination.exit_code)


def run_rank(
    config: TrainConfig,
    entry: str = DEFAULT_ENTRY,
    environ: Mapping[str, str] = os.environ,
    *,
    report_end: Callable[[RankReport], None] = lambda report: None,
) -> RankReport:
    """Do the work of the rank that the environment names, and return its report.

    If the rank hangs or is overtaken, the process ends here after `report_end` was called.
    """
    os.environ.update(cuda_environment(config, environ))
    try:
        return _Rank(config, environ, report_end).run(entry)
    finally:
        delete_log(os.environ)


class _Rank:
    """The rank of this process, with the telemetry and claims that its start opens."""

    def __init__(
        self,
        config: TrainConfig,
        environ: Mapping[str, str],
        report_end: Callable[[RankReport], None],
    ) -> None:
        self._config = config
        self._environ = environ
        self._report_end = report_end
        self._stop = StopSignal()
        self._telemetry: Telemetry | None = None
        self._generation = 1
        self._check_claims: Callable[[float], object] = lambda seconds: None
        self._rank = 0
        self._at_end = ExitStack()

    def run(self, entry: str) -> RankReport:
        with self._at_end:
            return self._run(entry)

    def _run(self, entry: str) -> RankReport:
        self._stop.install()
        termination, verdict = guard(lambda: self._fenced_work(entry), on_error=self._log_error)
        if verdict is not None and verdict.is_own_fault:
            termination = termination.model_copy(update={"rank": self._rank})
        if self._telemetry is not None:
            termination = _close(self._telemetry, termination)
        is_collateral = verdict is not None and verdict.is_collateral
        return self._report(termination, is_collateral=is_collateral)

    def _fenced_work(self, entry: str) -> Termination:
        """Do the work; if it fails, check the claims first.

        The error may be a consequence: a later attempt deletes earlier checkpoints, for example.

        Raises:
            OvertakenError: The work has failed, and a later attempt owns the folders.
            Exception: The work has failed.
        """
        try:
            return self._work(entry)
        except Exception:
            with suppress(OSError):  # the state of the claims is unknown
                self._check_claims(0.0)
            raise

    def _work(self, entry: str) -> Termination:
        config, environ, stop = self._config, self._environ, self._stop
        launch = read_launch(environ) or Launch("")
        self._rank = launch.rank
        page = self._node_page(launch)
        shared = Shared(page, launch.rank)
        witness = shared.witness()
        if launch.local_rank == 0:
            check_links(config, environ)
        if launch.launcher == ACCELERATE:  # accelerate dies of SIGTERM without forwarding it
            end_with_parent(os.getppid(), signal.SIGTERM)
        fence = None
        if launch.rank == 0:  # other ranks wait for it in the rendezvous
            fence = claim_folders(config, lambda: stop.requested)
            self._check_claims = fence.check_if_older
            claim = fence.holding(Path(config.checkpoint.dir)).claim
            run_dir = Path(config.run_dir)
            self._generation = free_generation(run_dir, claim.attempt, claim.generation)
            telemetry = self._open_telemetry(launch, shared)
            telemetry.log("claimed", generation=claim.generation)
            fence.watch(self._end_overtaken)
        if config.telemetry.collective_timings:
            enable_timing()
        with ExitStack() as importing:
            importing.enter_context(gc_paused())
            if config.world.world_size == 1:  # several ranks must agree in the rendezvous
                importing.enter_context(stop.calling(self._end_before_training))
            with (
                open_world(
                    config, environ, should_stop=lambda: stop.requested, on_wait=self._waits_for
                ) as world,
                ExitStack() as watching,
            ):
                distribute_page_address(world, page, launch)
                # Only rank 0 has claims; the others write to the folder of its logs.
                self._generation = gather_values(world.control_group, self._generation, int)[0]
                do_work = _load(entry)
                importing.close()
                if witness is not None:
                    witness.serve_collectives()
                telemetry = self._telemetry or self._open_telemetry(launch, shared)
                if world.group is not None:
                    uses_nccl = world.device.type == "cuda"
                    watching.enter_context(telemetry.collectives.watched(uses_nccl=uses_nccl))
                watching.enter_context(deterministic(is_asked=config.training.deterministic))
                return do_work(_continued(config, environ), world, stop, telemetry, fence)

    def _waits_for(self, missing: str) -> None:
        assert self._telemetry is not None, "rank 0 opens it before the rendezvous"
        self._telemetry.waits_for(missing)

    def _node_page(self, launch: Launch) -> NodePage:
        text = self._environ.get(ENV_NODE_PAGE)
        if text is not None:
            return NodePage.model_validate_json(text)
        return self._at_end.enter_context(
            page_without_supervisor(
                self._config,
                rank=launch.rank,
                local_rank=launch.local_rank,
                local_world_size=launch.local_world_size,
            )
        )

    def _open_telemetry(self, launch: Launch, shared: Shared) -> Telemetry:
        config, environ = self._config, self._environ
        started = environ.get(ENV_STARTED)
        try:
            self._telemetry = Telemetry(
                config,
                rank=launch.rank,
                world_size=launch.world_size,
                started=float(started) if started else None,
                restarts_in_place=restart_count(environ),
                shared=shared,
                generation=self._generation,
                check=self._check_claims,
            )
        except OSError as error:
            raise OutputNotWritableError(
                f"the run directory {config.run_dir} cannot be written ({error.strerror}: "
                f"{error.filename}); choose a folder that this process may write into"
            ) from error
        if (limit := limit_of(config)) is not None:
            stacks = self._telemetry.logs.absolute() / stacks_file(launch.rank)
            if (reports := environ.get(ENV_REPORT_DIR)) is not None:
                (Path(reports) / stacks.name).symlink_to(stacks)
            watch_progress(self._telemetry, limit, stacks, self._end_hung)
        return self._telemetry

    def _end_before_training(self) -> None:
        # The process leaves immediately, because imports take seconds, and an exception in C++ code
        # would abort it.
        self._end(preempted_before_training(self._stop.reason))

    def _end_hung(self, termination: Termination) -> None:
        self._end(termination.model_copy(update={"rank": self._rank}))

    def _end_overtaken(self, error: OvertakenError | ClaimLostError) -> None:
        assert self._telemetry is not None, "opened before the claims are watched"
        self._telemetry.release()
        time.sleep(_SECONDS_TO_LEAVE_TOGETHER)
        self._end(
            Termination(
                failure_class=error.failure_class,
                exit_code=error.exit_code,
                message=str(error),
                step=self._telemetry.progress.step,
                rank=self._rank,
            )
        )

    def _end(self, termination: Termination) -> NoReturn:
        assert self._telemetry is not None, "opened before any code can end this process"
        ended = _close(self._telemetry, termination)
        self._report_end(self._report(ended))
        leave(ended.exit_code)

    def _report(self, termination: Termination, *, is_collateral: bool = False) -> RankReport:
        return RankReport(
            rank=self._rank, time=time.time(), termination=termination, is_collateral=is_collateral
        )

    def _log_error(self, verdict: Verdict, trace: str) -> None:
        is_unexpected = verdict.exit_code == ExitCode.ERROR and not verdict.is_collateral
        if is_unexpected:
            print(trace, file=sys.stderr, flush=True)
        if verdict.failure_class is FailureClass.OUT_OF_MEMORY and "torch" in sys.modules:
            self._write_memory_snapshot()
        if self._telemetry is not None:
            details = {"trace": trace} if is_unexpected else {}
            self._telemetry.log(
                "failed", reason=verdict.failure_class, message=verdict.message, **details
            )

    def _write_memory_snapshot(self) -> None:
        """Write the state of the GPU's memory beside the stacks, while its tensors still exist."""
        from finetune_trainer.gpu import write_memory_snapshot

        if self._telemetry is None:
            return
        path = self._telemetry.logs / f"rank-{self._rank}.memory.pickle"
        try:
            if write_memory_snapshot(path):
                self._telemetry.log("memory_snapshot", path=str(path))
        except (OSError, RuntimeError) as error:
            self._telemetry.log("memory_snapshot", error=str(error))


def _continued(config: TrainConfig, environ: Mapping[str, str]) -> TrainConfig:
    """Let a restarted rank resume from its own commits, regardless of resumeFrom.

    Raises:
        ConfigError: Restarts are configured, but another launcher is in charge.
    """
    restarts = config.world.restarts_in_place
    if restarts and ENV_SUPERVISOR_PID not in environ:
        raise ConfigError(
            f"spec.restartPolicy.restartsInPlace {restarts} has no effect under another launcher; "
            "set it to 0 (torchrun has --max-restarts), or start python -m finetune_trainer itself"
        )
    return config.continued() if restart_count(environ) else config


def _close(telemetry: Telemetry, termination: Termination) -> Termination:
    """Write the end to the outlets, and add their state to the termination message.

    Only the first call counts: hanging ranks leave one by one, so the watchdog may report a hang at
    the moment when the work of the rank detects that others are gone.
    """
    with _closing:
        if termination.failure_class is FailureClass.OVERTAKEN:
            telemetry.release()
        if termination.exit_code == ExitCode.DONE and telemetry.progress.phase is not Phase.DONE:
            telemetry.phase(Phase.DONE)
        artifacts = termination.artifacts or telemetry.artifact_paths
        ended = with_progress(
            termination.model_copy(update={"artifacts": artifacts}), telemetry.progress
        )
        telemetry.log("ended", termination=ended.model_copy(update={"progress": None}))
        telemetry.close()
    return ended


def _load(entry: str) -> Entry:
    module, _, name = entry.partition(":")
    return cast(Entry, getattr(importlib.import_module(module), name))


if __name__ == "__main__":
    main()

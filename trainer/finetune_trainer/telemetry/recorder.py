"""Provide `Telemetry`, the single object through which the loop reports on the run."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any

import psutil

from finetune_trainer.config import (
    CheckpointRef,
    DataReport,
    Phase,
    PlanReport,
    ProfileReport,
    Progress,
    SampleAnswer,
    TrainConfig,
    redact,
)
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.telemetry.board import Board
from finetune_trainer.telemetry.boundary import StepBoundaries
from finetune_trainer.telemetry.checkpoints import CheckpointCosts
from finetune_trainer.telemetry.collectives import Collectives
from finetune_trainer.telemetry.collectives.transport import Transports
from finetune_trainer.telemetry.flops import peak_flops
from finetune_trainer.telemetry.gpu_device import Gpu
from finetune_trainer.telemetry.journal import Event, Journal
from finetune_trainer.telemetry.narrator import Narrator
from finetune_trainer.telemetry.numbers import GpuNumbers, Numbers, info_labels
from finetune_trainer.telemetry.phases import PhaseClock
from finetune_trainer.telemetry.processes import seconds_since_start
from finetune_trainer.telemetry.profile_requests import ProfileRequests
from finetune_trainer.telemetry.run_directory import SECONDS_OF_A_PAUSE, RunDirectory
from finetune_trainer.telemetry.shared import NodePage, Shared
from finetune_trainer.telemetry.slots import Word
from finetune_trainer.telemetry.spent import SpentTime
from finetune_trainer.telemetry.start_up import StartUp
from finetune_trainer.telemetry.step import StepReport, Throughput

_MAX_WARNINGS = 20
_SECONDS_BETWEEN_STEPS = 2.0  # in progress.json
_MAX_REPORT_DELAY_SECONDS = 0.5  # most that a step's report is delayed
_SILENT = (Phase.TOKENIZING, Phase.EXPORTING)
_LONG = (TimedPhase.CHECKPOINT_BLOCKING, TimedPhase.EVAL, TimedPhase.PROFILING)


class Telemetry:
    """Sends the reports of a rank to logs, files, its node's page and TensorBoard.

    Every rank has a journal and metrics on the page; all other outlets belong to rank 0. The loop
    calls from one thread; the checkpoint thread may call `warn` and `progress`.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        rank: int,
        world_size: int,
        clock: Callable[[], float] = time.time,
        started: float | None = None,
        restarts_in_place: int = 0,
        shared: Shared | None = None,
        generation: int = 1,
        check: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """Open the outlets.

        Args:
            config: The run.
            rank: Number of this rank.
            world_size: Number of ranks.
            clock: Seconds since the epoch.
            started: Start of the attempt's first process by `clock`; that of this process if None.
            restarts_in_place: How often the ranks were restarted within this attempt.
            shared: Files that the node's page reads; None without a page.
            generation: Number of this start of the attempt, which selects the folder of its logs.
            check: Checks the claims on the folders; see `RunDirectory`.

        Raises:
            OSError: The journal cannot be written.
            OvertakenError: The process was paused, and a later attempt owns the run directory.
        """
        self._lock = RLock()
        self._clock = clock
        self._config, self._rank = config, rank
        path, attempt = Path(config.run_dir), config.job.attempt
        self._folder = RunDirectory(path, attempt, generation, warn=self.warn, check=check)
        self._is_main = rank == 0
        self._throughput = Throughput()
        began = psutil.Process().create_time() if started is None else started
        self._start_up = StartUp(began, clock())
        self._spent = SpentTime(clock() - seconds_since_start())
        self._artifacts: tuple[str, ...] = ()
        self._warned: set[str] = set()
        self._progress = Progress(
            attempt=attempt, restarts_in_place=restarts_in_place, time=clock()
        )
        self._changes: dict[str, Any] = {}  # of the progress, not yet applied
        self._total_steps: int | None = None
        self._evaluated_losses: dict[int, float | None] = {}  # training loss by step
        self._is_compiling = False
        self._pending: deque[tuple[StepReport, float]] = deque()  # shared with other threads
        self._reported_at = float("-inf")
        check(SECONDS_OF_A_PAUSE)
        log_path = self.logs / f"rank-{rank}.jsonl"
        self._journal = Journal(log_path, attempt=attempt, rank=rank, clock=clock)
        self._written_at = self._news_read_at = float("-inf")
        self._shared = Shared(NodePage(), rank) if shared is None else shared
        self._shared.block.numbers[Word.GENERATION] = generation
        self._numbers = Numbers(self._shared.block, is_main=self._is_main)
        self.collectives = Collectives(
            self._shared.block, config.strategy, self.warn, self._shared.phases
        )
        self._boundaries = StepBoundaries(self._shared.block)
        self._board = self._open_board() if self._is_main else None
        self._narrator = Narrator() if self._is_main else None
        self._journal.write("started", {"world_size": world_size})  # fails if the disk is full
        self._numbers.begin(attempt)
        self._gpu: GpuNumbers | None = None
        self.checkpoint_costs = CheckpointCosts(self._shared.block)
        self.profile_requests = ProfileRequests(self._shared.block)
        self.is_recording_profile = False
        self._show(lambda: self._shared.publish_info(info_labels(config, rank)))
        self._update(metrics_url=self._shared.url)
        if self._shared.warning is not None:
            self.warn(self._shared.warning)

    @property
    def progress(self) -> Progress:
        """Current state as one frozen value; complete on rank 0 only."""
        with self._lock:
            self._report_steps(self._clock())
            # Computed on demand, because the state after most steps is never read.
            if self._changes:
                self._progress = self._progress.model_copy(update=self._changes)
                self._changes = {}
            return self._progress

    @property
    def logs(self) -> Path:
        """Folder for the logs of this start of the attempt."""
        return self._folder.logs

    @property
    def artifact_paths(self) -> tuple[str, ...]:
        """Paths passed to `artifacts`, for the termination message."""
        return self._artifacts

    @property
    def phases(self) -> PhaseClock:
        """Clock of the phases that this rank's time belongs to."""
        return self._shared.phases

    def take_save_request(self) -> bool:
        """Return whether a checkpoint was requested (`POST /checkpoint`), and clear the request."""
        return self._shared.take_save_request()

    def device(self, gpu: Gpu | None) -> None:
        """Record the GPU on which this rank computes; None on a CPU."""
        if gpu is None:
            return
        training = self._config.training
        peak = peak_flops(gpu.model, training.precision, is_float8=training.float8)
        self._gpu = GpuNumbers(self._shared.block, gpu, peak)
        self._show(lambda: self._shared.publish_info(info_labels(self._config, self._rank, gpu)))

    def chose(self, config: TrainConfig, report: PlanReport) -> None:
        """Record the configuration after the choices of `auto`, and report them."""
        self._config = config
        self.collectives.chose(config.strategy)
        labels = info_labels(config, self._rank)
        self._show(
            lambda: self._shared.publish_info(
                {name: labels[name] for name in ("strategy", "precision")}
            )
        )
        self.log("chosen", **report.model_dump(exclude_none=True))
        self._update(plan=report)

    def transport(self, own: Transports, of_run: Transports) -> None:
        """Report the transports of this rank's connections, and of all ranks' together."""
        self.log("transport", transport=str(own) or None, has_gpu_direct=own.has_gpu_direct)
        self._show(lambda: self._shared.publish_info({"transport": str(own)}))
        self._update(transport=str(of_run) or None)

    def log(self, event: str, **fields: object) -> None:
        """Write one line to this rank's journal only."""
        with self._lock:
            self._report_steps(self._clock())
            self._folder.put(lambda: self._journal.write(event, fields))

    def phase(self, phase: Phase) -> None:
        """Record that the run enters `phase`."""
        with self._lock:
            now = self._clock()
            self._report_steps(now)  # pending steps belong to the previous phase
            self._start_up.turn(phase, now)
            self._spent.turn(phase, now)
            self.log("phase", phase=phase)
            self._report_news_of_node(now)
            self._print(phase.value)
            self._update(phase=phase)

    def waits_for(self, missing: str) -> None:
        """Report the ranks that rank 0 waits for before it trains; empty once all have arrived."""
        changed = missing != (self.progress.waits_for or "")
        self._update(urgent=changed, waits_for=missing or None)

    def resumed(
        self,
        step: int,
        *,
        eval_loss_before: float | None = None,
        eval_loss: float | None = None,
        skipped_steps: int = 0,
        samples: Sequence[SampleAnswer] = (),
    ) -> None:
        """Report that training resumes after `step`, with the results of earlier attempts."""
        self.log("resumed", step=step)
        self._print(f"resumes from step {step}")
        if self._board is not None:
            self._board.purge(step + 1)
        self._update(
            resumed_step=step,
            step=step,
            eval_loss_before=eval_loss_before,
            eval_loss=eval_loss,
            skipped_steps=skipped_steps,
            samples=tuple(samples),
        )

    def data(self, train: DataReport | None = None, eval: DataReport | None = None) -> None:
        """Report the outcome of tokenising; None leaves the known report unchanged."""
        self.log("data", train=train, eval=eval)
        known = self.progress
        self._update(train_data=train or known.train_data, eval_data=eval or known.eval_data)

    def plan(self, total_steps: int) -> None:
        """Report the step at which training ends."""
        self.log("plan", total_steps=total_steps)
        self._total_steps = total_steps
        self._update(total_steps=total_steps)

    def step(self, report: StepReport) -> None:
        """Report one finished optimizer step.

        Fast steps are reported in batches, at most 0.5 s late, because a single report finds cold
        processor caches and takes ten times as long. Numbers by which ranks are compared are
        written immediately.
        """
        now = self._clock()
        # A report is one step late, so the time since the last one belongs to the current step.
        self._boundaries.mark(self.collectives.stepped(), is_profiled=self.is_recording_profile)
        self._pending.append((report, now))
        is_last = report.step == self._total_steps
        if is_last or now - self._reported_at >= _MAX_REPORT_DELAY_SECONDS:
            self._report_steps(now)

    def _report_steps(self, now: float) -> None:
        """Send all pending steps to every outlet."""
        with self._lock:
            pending = [self._pending.popleft() for _ in range(len(self._pending))]
            if not pending:
                return
            self._reported_at = now
            changes: dict[str, Any] = {}
            events: list[Event] = []
            for one in pending:
                self._report_step(*one, changes, events)
            self._folder.put(lambda: self._journal.write_all(events))
            newest = pending[-1][0].step
            changes["eta_seconds"] = self._eta_seconds(newest)
            self._update(urgent="first_step_seconds" in changes, **changes)
            self._report_news_of_node(now)
            is_last = newest == self._total_steps
            if self._narrator is not None and (is_last or self._narrator.is_due(now)):
                self._narrator.step(self.progress)
            self.collectives.read()
            if self._gpu is not None:
                self._gpu.look(now)

    def _report_step(
        self, report: StepReport, at: float, changes: dict[str, Any], events: list[Event]
    ) -> None:
        """Report one step; add progress changes to `changes` and journal events to `events`."""
        # After a profile the device has no queued work, so the next step is shorter.
        if not report.is_profiled and not report.profiling_seconds:
            self._throughput.add(report.tokens, report.seconds)
        self._spent.step(report)
        tokens_per_second = self._throughput.tokens_per_second
        self._numbers.step(report, self._throughput, at)
        line = {**report._asdict(), "tokens_per_second": tokens_per_second}
        events.append(("step", line, at))
        changes |= {
            "step": report.step,
            "epoch": report.epoch,
            "learning_rate": report.learning_rate,
            "tokens_per_second": tokens_per_second,
        }
        if report.loss is not None:
            changes["loss"] = report.loss
        if report.grad_norm is not None:
            changes["grad_norm"] = report.grad_norm
            if not math.isfinite(report.grad_norm):
                reason = "a gradient was not finite"
                events.append(("skipped", {"step": report.step, "reason": reason}, at))
                known = changes.get("skipped_steps", self.progress.skipped_steps)
                changes["skipped_steps"] = known + 1
        first = self._start_up.step(at)
        if first is not None:
            events.append(("first_step", {"seconds": first}, at))
            changes["first_step_seconds"] = first
        if self._board is not None:
            self._board.step(report, tokens_per_second, at)

    def loss_was_not_finite(self, step: int) -> None:
        """Report a step that ends the run because its loss is not finite."""
        self.log("loss_not_finite", step=step)
        self._numbers.loss_was_not_finite()

    def evaluated(self, step: int, loss: float, seconds: float) -> None:
        """Report the held-out loss; at step 0 it also becomes `eval_loss_before`."""
        self.log("evaluated", step=step, loss=loss, seconds=seconds)
        self._print(f"held-out loss {loss:.4g} at step {step}")
        before = self.progress.eval_loss_before
        if step == 0 and before is None:
            before = loss
        self._update(eval_loss=loss, eval_loss_before=before)
        self._evaluated_losses[step] = self.progress.loss
        self._numbers.evaluated(loss)
        if self._board is not None:
            self._board.evaluation(step, {"eval/loss": loss})

    def went_back(self, best: CheckpointRef) -> None:
        """Report that the weights of an earlier step are exported, and their losses.

        The training loss of a step before the last restart is not known.
        """
        self.log("went_back", step=best.step, eval_loss=best.eval_loss)
        self._update(
            exported_step=best.step,
            loss=self._evaluated_losses.get(best.step),
            eval_loss=best.eval_loss,
        )
        if best.eval_loss is not None:
            self._numbers.evaluated(best.eval_loss)

    def checkpointed(self, checkpoint: CheckpointRef, *, best: CheckpointRef | None = None) -> None:
        """Report a committed checkpoint and the best one so far."""
        self.log("checkpointed", checkpoint=checkpoint, best=best)
        self._print(f"checkpoint of step {checkpoint.step} committed")
        self._update(checkpoint=checkpoint, best_checkpoint=best)
        self._numbers.checkpointed(checkpoint)

    def profiled(self, report: ProfileReport) -> None:
        """Report a profile, which is written or could not be written, and accept the next one."""
        steps = f"steps {report.first_step} to {report.last_step}"
        self.log("profiled", **report.model_dump())
        if report.error is None:
            self._print(f"profile of {steps} written to {report.path}")
        else:
            self.warn(f"the profile of {steps} is lost ({report.error}); training continues")
        if self._is_main:
            self._update(profile=report)
            self.profile_requests.end()

    def answered(self, prompt: str, *, before: str | None = None, after: str | None = None) -> None:
        """Report the model's response to a sample prompt before or after training, or both."""
        self.log("answered", prompt=prompt, before=before, after=after)
        samples = {sample.prompt: sample for sample in self.progress.samples}
        known = samples.get(prompt, SampleAnswer(prompt=prompt))
        samples[prompt] = SampleAnswer(
            prompt=prompt,
            before=known.before if before is None else before,
            after=known.after if after is None else after,
        )
        self._update(samples=tuple(samples.values()))

    def warn(self, sentence: str) -> None:
        """Warn the user once per message, without credentials: in log, progress and on stderr."""
        sentence = redact(sentence)
        with self._lock:
            if sentence in self._warned:
                return
            self._warned.add(sentence)
            self.log("warning", message=sentence)
            with suppress(OSError):  # full disk or closed reader; the progress has it as well
                print(f"warning: {sentence}", file=sys.stderr, flush=True)
            self._update(warnings=(*self.progress.warnings, sentence)[-_MAX_WARNINGS:])

    def artifacts(self, paths: Sequence[str]) -> None:
        """Report the paths that the export has written."""
        self._artifacts = tuple(paths)
        self.log("exported", artifacts=self._artifacts)

    def alive(self) -> None:
        """Record that the run makes progress when there is no other report."""
        self._shared.seen()

    @property
    def idle_seconds(self) -> float:
        """Time since the last report; 0 in phases that report only at their end."""
        return 0.0 if self.progress.phase in _SILENT else self._shared.idle_seconds

    @property
    def is_stepping(self) -> bool:
        """Whether this rank is in a step after its first, outside of work that a step waits for."""
        is_training = self.progress.phase is Phase.TRAINING and self._start_up.is_over
        return is_training and self.phases.phase not in _LONG and not self._is_compiling

    @property
    def median_step_seconds(self) -> float | None:
        """Median of the last 100 steps; None before the tenth step."""
        with self._lock:
            return self._throughput.median_seconds_per_step

    def compiling(self, is_on: bool) -> None:
        """Report that torch compiles a graph on this rank, or has finished."""
        self._is_compiling = is_on

    def release(self) -> None:
        """Stop writing into the run directory, which now belongs to a later attempt."""
        self._folder.release()

    def close(self) -> None:
        """Write the last progress and close every outlet; a second call does nothing."""
        with self._lock:
            self._update()
            self.phases.stop()
            if self._board is not None:
                self._board.close()
            with suppress(OSError):  # a full disk, which an earlier write has reported
                self._journal.close()

    def _report_news_of_node(self, now: float) -> None:
        """Report what the processes of the page and of the trackers have published.

        Read as rarely as the progress is written.
        """
        if now - self._news_read_at >= _SECONDS_BETWEEN_STEPS:
            self._news_read_at = now
            for sentence in self._shared.warnings_of_node():
                self.warn(sentence)
            trackers = self._shared.trackers_of_node()
            if trackers and trackers != self.progress.trackers:
                self._update(trackers=trackers)

    def _open_board(self) -> Board:
        folder = self._folder
        return Board(
            folder.curves, clock=self._clock, put=folder.put, has_room=lambda: folder.has_room
        )

    def _print(self, sentence: str) -> None:
        if self._narrator is not None:
            self._narrator.line(sentence)

    def _update(self, *, urgent: bool = True, **changes: Any) -> None:
        with self._lock:
            self.alive()
            now = self._clock()
            self._report_steps(now)
            self._changes.update(changes, time=now)
            is_due = urgent or now - self._written_at >= _SECONDS_BETWEEN_STEPS
            if self._is_main and is_due:
                self._changes["spent"] = self._spent.at(now)
                self._written_at = now
                text = self.progress.to_json()
                self._show(lambda: self._shared.publish_progress(text))  # no disk can delay this
                self._folder.put_progress(text)

    def _eta_seconds(self, step: int) -> float | None:
        total, seconds = self._total_steps, self._throughput.seconds_per_step
        return None if total is None or seconds is None else max(0, total - step) * seconds

    def _show(self, write: Callable[[], object]) -> None:
        """Publish a text on the node's page; training continues if there is no room for it."""
        try:
            write()
        except OSError as error:
            self.warn(
                f"the page of this node cannot be updated ({error.strerror or error}); "
                "training continues"
            )

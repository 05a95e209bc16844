"""Tells Azure ML how the run goes, and hears from there that it shall stop.

A thread in the main process of node 0, started by `entry`: it reads what rank 0 writes to the local
disk, so no training process waits for it, shares its interpreter with it, or imports MLflow.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from pydantic import ValidationError

from finetune_trainer.config import (
    HEARD_TAG,
    PROGRESS_TAG,
    STOP_TAG,
    CheckpointRef,
    Heard,
    Progress,
    TrainConfig,
    read_progress,
)
from finetune_trainer.control import StopSignal
from finetune_trainer.launch.azureml.curves import Curves, Point
from finetune_trainer.launch.azureml.mlflow_run import RefusedError
from finetune_trainer.launch.azureml.tags import progress_text

SECONDS_BETWEEN_TURNS = 1.0
SECONDS_BETWEEN_REPORTS = 15.0
SECONDS_BETWEEN_POLLS = 10.0
SECONDS_FOR_THE_LAST_REPORT = 5.0
_MAX_CAUSE = 160  # characters


class RemoteRun(Protocol):
    """What the reporter needs of the run; each method is one request, and may raise anything."""

    def tags(self) -> Mapping[str, str]:
        """Return the tags."""

    def report(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points to the curves, and set tags."""


def say(sentence: str) -> None:
    """Print to stderr, which is a part of the job's log."""
    with suppress(OSError):  # a full disk; the log is all there is
        print(sentence, file=sys.stderr, flush=True)


class Reporter:
    """Reports about every 15 s, at once for a checkpoint, and at the end; looks for the stop tag.

    As a context manager it is around the work of the ranks. What was read by then is reported
    last; `wait` waits for it. What cannot be sent waits for the next turn, curves as points that
    become fewer, all else as the newest state.
    """

    def __init__(
        self,
        config: TrainConfig,
        stop: StopSignal,
        open_run: Callable[[], RemoteRun],
        *,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = say,
    ) -> None:
        """Prepare.

        `open_run` is called from the thread. `clock` gives seconds since the epoch.
        """
        run_dir = Path(config.run_dir)
        self._checkpoints = Path(config.checkpoint.dir)
        self._stop = stop
        self._open_run = open_run
        self._clock = clock
        self._say = say
        self._began = clock()
        self._run_dir = run_dir
        self._progress: Progress | None = None
        self._curves = Curves(run_dir / "logs" / "rank-0.jsonl")
        self._reading = threading.Lock()  # the end is read from the main thread
        self._told: CheckpointRef | None = None
        self._report_at = self._look_at = float("-inf")
        self._failing: set[str] = set()
        self._telling = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="reporter", daemon=True)

    def __enter__(self) -> None:
        """Start."""
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Read for the last time, before the run directory goes, and say nothing any more."""
        self._read()
        with self._telling:
            self._ending.set()

    def wait(self, seconds: float = SECONDS_FOR_THE_LAST_REPORT) -> None:
        """Wait for the last report, or until it takes too long."""
        self._thread.join(seconds)

    def turn(self, run: RemoteRun, now: float) -> None:
        """Do what is due; `now` is in seconds on a clock that only goes forward."""
        self._read()
        if now >= self._look_at and not self._stop.requested:
            self._look_at = now + SECONDS_BETWEEN_POLLS
            self._try("look", lambda: self._look(run))
        checkpoint = self._progress.checkpoint if self._progress else None
        if now >= self._report_at or checkpoint != self._told:
            self._told = checkpoint
            self._report_at = now + SECONDS_BETWEEN_REPORTS
            self._try("report", lambda: self._report(run))

    def _work(self) -> None:
        try:
            run = self._open_run()
        except Exception as error:  # what an import raises; no training ends of it
            self._tell(
                f"warning: {error}; without it Studio draws no curves, the job's status has no "
                "progress, and a stop without SIGTERM costs the steps since the last checkpoint; "
                "training goes on"
            )
            return
        while not self._ending.is_set():
            self.turn(run, time.monotonic())
            self._ending.wait(SECONDS_BETWEEN_TURNS)
        self._try("report", lambda: self._report(run))

    def _read(self) -> None:
        with self._reading:
            self._curves.read()
            try:
                progress = read_progress(self._run_dir)
            except (OSError, ValidationError):
                return  # rank 0 has not got so far, or tells itself what is wrong with its disk
            if progress.time >= self._began:  # else of an earlier start in the same folder
                self._progress = progress

    def _look(self, run: RemoteRun) -> None:
        if run.tags().get(STOP_TAG):
            self._tell(f"the tag {STOP_TAG} asks for a stop")
            self._stop.request(f"the tag {STOP_TAG}")

    def _report(self, run: RemoteRun) -> None:
        with self._reading:
            points, progress, starts = self._curves.points, self._progress, self._curves.starts
        heard = Heard(time=self._clock(), starts=starts)
        tags = {HEARD_TAG: heard.model_dump_json(by_alias=True, exclude_none=True)}
        if progress is not None:
            tags[PROGRESS_TAG] = progress_text(progress, self._checkpoints)
        try:
            run.report(points, tags)
        except RefusedError:
            if not points:
                raise
            run.report((), tags)  # else one bad point would hide the progress from now on
            self._forget(points)
            raise
        self._forget(points)

    def _forget(self, points: Sequence[Point]) -> None:
        if points:
            with self._reading:
                self._curves.forget(points[-1].number)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Do one request; tell of the first that fails, and when none fails any more."""
        was_failing = bool(self._failing)
        try:
            work()
        except Exception as error:  # of MLflow, the plugin or the network: no training ends of it
            self._failing.add(what)
            news = f"warning: Azure ML does not take the reports of this run ({_cause(error)}); "
            news += "training goes on"
        else:
            self._failing.discard(what)
            news = "Azure ML takes the reports of this run again"
        if bool(self._failing) != was_failing:
            self._tell(news)

    def _tell(self, sentence: str) -> None:
        """Write it into the log, but nothing behind the last words, which others read there."""
        with self._telling:
            if not self._ending.is_set():
                self._say(sentence)


def _cause(error: Exception) -> str:
    """Return the end of the first line, as addresses come first and causes last."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return text if len(text) <= _MAX_CAUSE else f"...{text[-_MAX_CAUSE:]}"

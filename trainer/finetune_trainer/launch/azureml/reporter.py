"""Report the progress of the run to Azure ML, and receive stop requests from there.

`entry` starts it as a thread in the main process of node 0. It reads rank 0's files on the local
disk, so no training process waits for it, shares an interpreter with it, or imports MLflow.
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
from finetune_trainer.launch.azureml.curves import Curves
from finetune_trainer.launch.azureml.mlflow_run import RefusedError
from finetune_trainer.launch.azureml.tags import progress_text
from finetune_trainer.launch.journal_points import Point

SECONDS_BETWEEN_TURNS = 1.0
SECONDS_BETWEEN_REPORTS = 15.0
SECONDS_BETWEEN_POLLS = 10.0
SECONDS_FOR_THE_LAST_REPORT = 5.0
_MAX_CAUSE = 160  # characters


class RemoteRun(Protocol):
    """Methods of the run that the reporter uses; each is one request and may raise anything."""

    def tags(self) -> Mapping[str, str]:
        """Return the tags."""

    def report(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points to the curves and set tags."""


def log(sentence: str) -> None:
    """Print to stderr, which is part of the job's log."""
    with suppress(OSError):  # a full disk; there is no other log
        print(sentence, file=sys.stderr, flush=True)


class Reporter:
    """Reports about every 15 s, at once for a checkpoint, and at the end; polls the stop tag.

    As a context manager it surrounds the work of the ranks. The state at its end is reported last;
    `wait` waits for that. Data that cannot be sent waits for the next turn: curves are thinned out,
    and all other data is replaced by its newest state.
    """

    def __init__(
        self,
        config: TrainConfig,
        stop: StopSignal,
        open_run: Callable[[], RemoteRun],
        *,
        clock: Callable[[], float] = time.time,
        log: Callable[[str], None] = log,
    ) -> None:
        """Prepare.

        Args:
            config: The run.
            stop: Receives a stop request from Azure ML.
            open_run: Opens the run; called from the thread.
            clock: Seconds since the epoch.
            log: Prints a line to the job's log.
        """
        run_dir = Path(config.run_dir)
        self._checkpoints = Path(config.checkpoint.dir)
        self._stop = stop
        self._open_run = open_run
        self._clock = clock
        self._log = log
        self._began = clock()
        self._run_dir = run_dir
        self._progress: Progress | None = None
        self._curves = Curves(config)
        self._reading = threading.Lock()  # the main thread reads at the end
        self._reported: CheckpointRef | None = None
        self._report_at = self._poll_at = float("-inf")
        self._failing: set[str] = set()
        self._logging = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="reporter", daemon=True)

    def __enter__(self) -> None:
        """Start the thread."""
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Read once more before the run directory is deleted, and stop logging."""
        self._read()
        with self._logging:
            self._ending.set()

    def wait(self, seconds: float = SECONDS_FOR_THE_LAST_REPORT) -> None:
        """Wait for the last report, at most `seconds`."""
        self._thread.join(seconds)

    def turn(self, run: RemoteRun, now: float) -> None:
        """Do the requests that are due; `now` is in seconds of a monotonic clock."""
        self._read()
        if now >= self._poll_at and not self._stop.requested:
            self._poll_at = now + SECONDS_BETWEEN_POLLS
            self._try("poll", lambda: self._poll_stop(run))
        checkpoint = self._progress.checkpoint if self._progress else None
        if now >= self._report_at or checkpoint != self._reported:
            self._reported = checkpoint
            self._report_at = now + SECONDS_BETWEEN_REPORTS
            self._try("report", lambda: self._report(run))

    def _work(self) -> None:
        try:
            run = self._open_run()
        except Exception as error:  # any error of an import; must not end training
            self._log_line(
                f"warning: {error}; without it Studio draws no curves, the job's status has no "
                "progress, and a stop without SIGTERM costs the steps since the last checkpoint; "
                "training continues"
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
                return  # not written yet, or rank 0 itself reports the error of its disk
            if progress.time >= self._began:  # else left by an earlier start in the same folder
                self._progress = progress

    def _poll_stop(self, run: RemoteRun) -> None:
        if run.tags().get(STOP_TAG):
            self._log_line(f"the tag {STOP_TAG} requests a stop")
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
            run.report((), tags)  # otherwise one bad point would hide all later progress
            self._forget(points)
            raise
        self._forget(points)

    def _forget(self, points: Sequence[Point]) -> None:
        if points:
            with self._reading:
                self._curves.forget(points[-1].number)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Do one request; log the first failure, and the first success after it."""
        was_failing = bool(self._failing)
        try:
            work()
        except Exception as error:  # of MLflow, the plugin or the network; must not end training
            self._failing.add(what)
            news = f"warning: Azure ML does not accept the reports of this run ({_cause(error)}); "
            news += "training continues"
        else:
            self._failing.discard(what)
            news = "Azure ML accepts the reports of this run again"
        if bool(self._failing) != was_failing:
            self._log_line(news)

    def _log_line(self, sentence: str) -> None:
        """Log a line unless the end has begun: the termination message must be the last line."""
        with self._logging:
            if not self._ending.is_set():
                self._log(sentence)


def _cause(error: Exception) -> str:
    """Return the end of the first line; it begins with addresses and ends with the cause."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return text if len(text) <= _MAX_CAUSE else f"...{text[-_MAX_CAUSE:]}"

"""Follow the journal for each tracker in a thread, until the supervisor closes standard input.

A tracker that fails or hangs costs one warning: its thread retries, and the journal on the disk
buffers what is not sent. The supervisor kills this process if a tracker takes too long at the end.
"""

import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from urllib.parse import urlsplit

from finetune_trainer.config import TrackerConfig, TrackerRun, TrainConfig
from finetune_trainer.launch.journal_points import JournalPoints, Point
from finetune_trainer.launch.trackers import mlflow_run, wandb_run
from finetune_trainer.launch.trackers.tracker import (
    PREFIXES,
    End,
    NotAvailableError,
    RefusedPointsError,
    RunFacts,
    Tracker,
    credentials_of,
    seconds_for_the_end,
)
from finetune_trainer.telemetry.shared import publish_trackers, publish_warning
from finetune_trainer.with_parent import end_with_parent

SECONDS_BETWEEN_TURNS = 2.0
SECONDS_BETWEEN_RETRIES = 15.0
SECONDS_UNTIL_IT_HANGS = 60.0
SECONDS_TO_WARN = 1.0
"""Time for the last warning, before the supervisor kills this process."""
POINTS_PER_REQUEST = 200  # of at most 4 values; MLflow accepts 1,000 values
MAX_CAUSE = 160  # characters
MAX_URL = 512

_OPEN: dict[str, Callable[[TrackerConfig, RunFacts], Tracker]] = {
    "wandb": wandb_run.WandbRun,
    "mlflow": mlflow_run.MlflowRun,
}
_SECRET_VARIABLES = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")


class Follower:
    """Sends the points of the journal to one tracker."""

    def __init__(
        self,
        open_tracker: Callable[[], Tracker],
        journal: JournalPoints,
        *,
        opened: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            open_tracker: Opens the run.
            journal: The points.
            opened: Receives the URL of the run, if it has one.
            warn: Receives one sentence at most.
        """
        self._open_tracker = open_tracker
        self._journal = journal
        self._opened = opened
        self._warn = warn
        self._pending: list[Point] = []
        self._busy_since: float | None = None
        self._has_warned = self._is_unavailable = False
        self._end = End.FAILED
        self._ending = Event()
        self._thread = Thread(target=self._work, name="tracker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def check(self) -> None:
        """Warn if the tracker hangs."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > SECONDS_UNTIL_IT_HANGS:
            self._complain(f"it has not responded for {SECONDS_UNTIL_IT_HANGS:g} s")

    def finish(self, end: End) -> None:
        """Ask the thread to send the rest."""
        self._end = end
        self._ending.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread, and warn if it does not finish in time."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._complain("it did not take the last points in time")

    def _work(self) -> None:
        tracker = self._open()
        if tracker is None:
            return
        while True:
            is_last = self._ending.is_set()
            has_sent = self._try(partial(self._send, tracker))
            if is_last:
                break
            self._ending.wait(SECONDS_BETWEEN_TURNS if has_sent else SECONDS_BETWEEN_RETRIES)
        self._try(lambda: tracker.finish(self._end))

    def _open(self) -> Tracker | None:
        """Return the opened run, after retries; None if there is none before the end."""
        found: list[Tracker] = []
        while not self._try(lambda: found.append(self._open_tracker())):
            if self._is_unavailable or self._ending.wait(SECONDS_BETWEEN_RETRIES):
                return None
        url = found[0].url
        if url is not None and len(url) <= MAX_URL and _is_page(url):
            self._opened(url)
        return found[0]

    def _send(self, tracker: Tracker) -> None:
        self._pending = self._pending or [point for _, point in self._journal.read()]
        while self._pending:
            points = self._pending[:POINTS_PER_REQUEST]
            try:
                tracker.log(points)
            except RefusedPointsError as error:
                self._complain(str(error))  # without these points the next ones are sent
            del self._pending[: len(points)]

    def _try(self, work: Callable[[], None]) -> bool:
        """Do something that may block, and return whether it succeeded."""
        self._busy_since = time.monotonic()
        try:
            work()
        except NotAvailableError as error:
            self._is_unavailable = True
            self._complain(str(error))
        except Exception as error:  # of a library or the network; must not end the other tracker
            self._complain(str(error) or type(error).__name__)
        else:
            return True
        finally:
            self._busy_since = None
        return False

    def _complain(self, cause: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(cause)


class Desk:
    """Passes URLs and warnings to the first rank of the node, or to the log without its page."""

    def __init__(self, folder: Path | None, log: Callable[[str], None]) -> None:
        self._folder, self._log = folder, log
        self._runs: tuple[TrackerRun, ...] = ()
        self._lock = Lock()

    def opened(self, kind: str, url: str) -> None:
        """Publish the URL of a run."""
        with self._lock:
            self._runs = (*self._runs, TrackerRun(type=kind, url=url))
            if self._folder is not None:
                with suppress(OSError):  # the page is gone at the end of the attempt
                    publish_trackers(self._folder, self._runs)

    def warn(self, tracker: TrackerConfig, cause: str) -> None:
        """Publish the warning of a tracker without its secrets."""
        sentence = (
            f"tracker {tracker.type}: {_one_line(cause, _secrets(tracker))}; its curves may be "
            "incomplete, and training continues"
        )
        with self._lock:
            try:
                if self._folder is not None:
                    publish_warning(self._folder, sentence)
                    return
            except OSError:
                pass  # the page is gone at the end of the attempt
            self._log(f"warning: {sentence}")


def main(arguments: Sequence[str]) -> None:
    """Run until standard input ends with the word of an `End`."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path, after, folder = arguments
    config = TrainConfig.read(Path(path))
    trackers = config.telemetry.trackers or ()
    desk = Desk(Path(folder) if folder else None, _private_log())
    _drop_variables(trackers)
    facts = RunFacts.of(config, Path(tempfile.gettempdir()))
    followers = [
        Follower(
            partial(_OPEN[one.type], one, facts),
            JournalPoints(config, int(after)),
            opened=partial(desk.opened, one.type),
            warn=partial(desk.warn, one),
        )
        for one in trackers
    ]
    for one in followers:
        one.start()
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        for one in followers:
            one.check()
    word = sys.stdin.read()
    for one in followers:
        one.finish(End(word) if word in list(End) else End.FAILED)
    deadline = time.monotonic() + seconds_for_the_end(word) - SECONDS_TO_WARN
    for one in followers:
        one.join(max(0.0, deadline - time.monotonic()))
    os._exit(0)  # a library may wait in a handler of the interpreter's exit


def _is_page(url: str) -> bool:
    return url.startswith(("http://", "https://")) and url.isprintable()


def _private_log() -> Callable[[str], None]:
    """Return a function that prints to standard error, which libraries can no longer write to."""
    error = os.fdopen(os.dup(2), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return lambda line: print(line, file=error, flush=True)


def _drop_variables(trackers: Sequence[TrackerConfig]) -> None:
    """Drop the variables of trackers whose address and credentials the configuration has.

    In a pod a user could have set them.
    """
    for tracker in trackers:
        if tracker.url is not None:
            for name in [one for one in os.environ if one.startswith(PREFIXES[tracker.type])]:
                del os.environ[name]


def _secrets(tracker: TrackerConfig) -> list[str]:
    """Return the texts that no message may contain."""
    try:
        found = [credentials_of(tracker)]
    except NotAvailableError:
        found = []
    found += [found[0].partition(":")[2]] if found else []
    found += [os.environ.get(name, "") for name in _SECRET_VARIABLES]
    with suppress(ValueError):  # not a URL, which `MlflowServer` reports
        found.append(urlsplit(os.environ.get("MLFLOW_TRACKING_URI", "")).password or "")
    return sorted({one for one in found if one}, key=len, reverse=True)


def _one_line(cause: str, secrets: Sequence[str]) -> str:
    """Return the first line of a message, without secrets and control characters."""
    for secret in secrets:
        cause = cause.replace(secret, "***")
    line = "".join(one if one.isprintable() else " " for one in cause.strip().partition("\n")[0])
    return line if len(line) <= MAX_CAUSE else f"{line[: MAX_CAUSE - 1]}…"

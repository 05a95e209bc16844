"""Supervise the ranks of a node until all have ended, and record how each one ended.

`supervisor` passes in the processes that it started. This module decides when a rank is ended;
`termination_message` interprets the result.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from finetune_trainer.config import ExitCode
from finetune_trainer.control import StopSignal
from finetune_trainer.launch.last_words import LastWords, report_of_abort
from finetune_trainer.launch.rank_report import RankReport, read_report
from finetune_trainer.launch.stacks import stacks_of_timer
from finetune_trainer.launch.termination_message import EndedBy, RankExit

# Ranks notice a lost peer within milliseconds on gloo; NCCL may hang until it is killed.
FAILURE_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05

Processes = Mapping[int, "subprocess.Popen[bytes]"]


class RankWatch:
    """Watches the ranks of one attempt on this node until they have ended.

    If a stop is requested, it forwards SIGTERM and gives the ranks the grace period to leave. If a
    rank was stopped from outside, it stops the others. If a rank fails, it soon ends the others,
    because no step can finish without that rank.
    """

    def __init__(self, reports: Path, stop: StopSignal, grace_seconds: float) -> None:
        """Prepare to watch ranks that leave their reports in the folder `reports`."""
        self.exits: list[RankExit] = []
        self._reports = reports
        self._stop = stop
        self._grace_seconds = grace_seconds
        self._has_sent_sigterm = False
        self._deadline = float("inf")
        self._deadline_is_for = EndedBy.ITSELF
        self._words: dict[int, LastWords] = {}

    def until_all_ended(self, processes: Processes) -> None:
        """Wait until all processes have ended; their stderr, if a pipe, is forwarded."""
        running = dict(processes)
        self._words = {
            rank: LastWords(process.stderr)
            for rank, process in processes.items()
            if process.stderr is not None
        }
        while True:
            now = time.monotonic()
            self._collect(running)
            if not running:
                break
            if not self._has_sent_sigterm and (self._stop.requested or self._has_left):
                self._has_sent_sigterm = True
                self._set_deadline(now + self._grace_seconds, EndedBy.END_OF_GRACE)
                _signal_all(running, signal.SIGTERM)
            if self._has_failed:
                self._set_deadline(now + FAILURE_GRACE_SECONDS, EndedBy.FAILURE_OF_ANOTHER)
            if now >= self._deadline:
                _signal_all(running, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        _kill_orphans(processes)
        for words in self._words.values():
            words.text()  # forward all of it before the supervisor's own messages

    @property
    def _has_left(self) -> bool:
        return any(e.is_preempted for e in self.exits)

    @property
    def _has_failed(self) -> bool:
        return any(e.outcome != ExitCode.DONE and not e.is_preempted for e in self.exits)

    def _set_deadline(self, deadline: float, reason: EndedBy) -> None:
        """Only move the deadline forward: a failure during the grace period shortens it."""
        if deadline < self._deadline:
            self._deadline, self._deadline_is_for = deadline, reason

    def _collect(self, running: dict[int, "subprocess.Popen[bytes]"]) -> None:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            was_killed = code == -signal.SIGKILL and time.monotonic() >= self._deadline
            self.exits.append(
                RankExit(
                    rank=rank,
                    code=code,
                    time=time.time(),
                    ended_by=self._deadline_is_for if was_killed else EndedBy.ITSELF,
                    report=self._report(rank, code),
                    stacks=stacks_of_timer(self._reports, rank) if code == ExitCode.ERROR else None,
                )
            )

    def _report(self, rank: int, code: int) -> RankReport | None:
        """Return the report of a rank, or of its C++ code."""
        report = read_report(self._reports, rank)
        if report is not None or code != -signal.SIGABRT or rank not in self._words:
            return report
        return report_of_abort(rank, time.time(), self._words[rank].text())


def _signal_all(running: Processes, number: signal.Signals) -> None:
    for process in running.values():
        process.send_signal(number)


def _kill_orphans(processes: Processes) -> None:
    """Kill the orphaned children of ranks that died.

    Every rank leads its own process group.
    """
    for process in processes.values():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # the usual case: no process is left

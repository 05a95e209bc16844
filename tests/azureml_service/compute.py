"""What becomes of jobs: each runs its real command, or nothing and a test sets its state."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from azureml_service.jobs import PREEMPTED, Job, Jobs
from azureml_service.nodes import MountError, Place, Process, Rank

_BEFORE = ("NotStarted", "Preparing", "Queued")
_LOOK_SECONDS = 0.02


@dataclass
class Settings:
    """How jobs live; may change at any time.

    Attributes:
        runs_jobs: Whether new jobs run their command.
        first_state: Of a new job that runs nothing.
        stays: Seconds that a job stays in a state before the next, where that is not 0.
        stuck: States that no job leaves by itself.
        cancel: What a cancel does: "sigterm", "sigkill" without a SIGTERM, "unheard" where only
            the state says so, or "ignored" where nothing does.
        grace: Seconds from SIGTERM to SIGKILL.
        peers: Seconds that the other nodes have when one has failed.
        run_token: Seconds that a run's own token is good.
    """

    runs_jobs: bool = False
    first_state: str = "NotStarted"
    stays: dict[str, float] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    cancel: str = "sigterm"
    grace: float = 30.0
    peers: float = 30.0
    run_token: float = 24 * 3600.0


class Compute:
    """Lets jobs live.

    Args:
        jobs: Which ones.
        settings: How.
        place: Where processes run.
        token_of: Gives a run, by its name, a token for some seconds.
    """

    def __init__(
        self,
        jobs: Jobs,
        settings: Settings,
        place: Place,
        token_of: Callable[[str, float], str],
    ) -> None:
        self._jobs, self._settings, self._place = jobs, settings, place
        self._token_of = token_of
        self._lives: set[str] = set()
        self._processes: dict[str, list[Process]] = {}
        self._is_closed = False
        jobs.on_put, jobs.on_cancel = self._begin, self._cancel

    def close(self) -> None:
        """End all processes."""
        with self._jobs.changed:
            self._is_closed = True
            running = [one for group in self._processes.values() for one in group]
        for process in running:
            process.kill()

    def preempt(self, job: Job, how: str) -> None:
        """Take the nodes of a job away.

        Args:
            job: Which one.
            how: "failed", or "requeued" where the service starts the same run again.
        """
        with self._jobs.changed:
            if job.name in self._lives:
                job.preemption = how
                self._jobs.changed.notify_all()
            elif how == "failed":
                self._jobs.set_state(job, "Failed", error=("UserError", PREEMPTED))
            else:
                self._jobs.set_state(job, "Queued")

    def _begin(self, job: Job) -> None:
        if not self._settings.runs_jobs:
            self._jobs.set_state(job, self._settings.first_state)
            return
        self._lives.add(job.name)
        threading.Thread(target=self._live, args=(job,), name=job.name, daemon=True).start()

    def _cancel(self, job: Job) -> None:
        if self._settings.cancel == "ignored":
            return
        self._jobs.set_state(job, "CancelRequested")
        if self._settings.cancel == "unheard":
            return
        job.is_cancelled = True
        if job.name in self._lives:
            return
        if self._settings.stays.get(job.state) or job.state in self._settings.stuck:
            threading.Thread(target=self._end_cancelled, args=(job,), daemon=True).start()
        else:
            self._jobs.set_state(job, "Canceled")

    def _live(self, job: Job) -> None:
        if not self._has_run(job):
            self._end_cancelled(job)
        with self._jobs.changed:
            self._lives.discard(job.name)

    def _has_run(self, job: Job) -> bool:
        """Let a job live to its end; return whether it came there, and was not cancelled."""
        states: tuple[str, ...] = _BEFORE
        while all(self._stay(job, state) for state in states):
            error = self._run(job)
            with self._jobs.changed:
                if job.is_cancelled or self._is_closed:
                    return False
                if job.preemption == "failed":  # whoever takes nodes away writes nothing back
                    self._jobs.set_state(job, "Failed", error=error)
                    return True
                if job.preemption == "requeued":
                    job.preemption, states = "", ("Queued",)
                    continue
            if not self._stay(job, "Finalizing"):
                return False
            self._jobs.set_state(job, "Failed" if error else "Completed", error=error)
            return True
        return False

    def _end_cancelled(self, job: Job) -> None:
        if self._stay(job, "CancelRequested", is_cancellable=False):
            self._jobs.set_state(job, "Canceled")

    def _stay(self, job: Job, state: str, *, is_cancellable: bool = True) -> bool:
        """Be in a state as long as the settings say; return whether the job goes on."""
        jobs, settings = self._jobs, self._settings
        until = time.monotonic() + settings.stays.get(state, 0.0)
        with jobs.changed:
            is_in = False
            while not self._is_closed and not (is_cancellable and job.is_cancelled):
                if not is_in:
                    jobs.set_state(job, state)
                    is_in = True
                rest = until - time.monotonic()
                if state not in settings.stuck and rest <= 0:
                    return True
                jobs.changed.wait(rest if rest > 0 else None)
        return False

    def _run(self, job: Job) -> tuple[str, str] | None:
        """Run all processes until they have ended; return the error, if it is one."""
        job.starts += 1
        try:
            processes = self._start(job)
        except MountError as error:
            return "UserError", f"Data access failed. {error}"
        with self._jobs.changed:
            if not job.is_cancelled:
                self._jobs.set_state(job, "Running")
        try:
            codes = self._watch(job, processes)
        finally:
            for process in processes:
                process.kill()  # with the container goes what its main process has left
        if job.preemption:
            return "UserError", PREEMPTED
        for rank, code in enumerate(codes):
            if code:
                log = list(job.logs)[rank]
                return "UserError", (
                    f"Execution failed. User process 'python' exited with status code {code}. "
                    f"Please check log file '{log}' for error details."
                )
        return None

    def _start(self, job: Job) -> list[Process]:
        from support.launch.launches import free_port  # imports the trainer's contract

        resources = job.properties.get("resources") or {}
        distribution = job.properties.get("distribution") or {}
        nodes = resources.get("instanceCount") or 1
        on_node = distribution.get("processCountPerInstance") or 1
        port = free_port() if distribution else None
        token = self._token_of(job.name, self._settings.run_token)
        started: list[Process] = []
        logs: dict[str, Callable[[], bytes]] = {}
        with self._jobs.changed:
            self._processes[job.name] = started
            for number in range(0 if self._is_closed else nodes * on_node):
                node, local = divmod(number, on_node)
                rank = Rank(node, local, nodes, on_node, port)
                process = Process(job, rank, self._place, token)
                started.append(process)
                logs[rank.log_path] = process.log.read_bytes
            job.logs = logs
        return started

    def _watch(self, job: Job, processes: list[Process]) -> list[int]:
        """Wait for the end of all processes, ending them where the job must end."""
        kill_at: float | None = None
        is_told = False
        while None in (codes := [one.exit_code for one in processes]):
            now = time.monotonic()
            must_end = job.preemption or (job.is_cancelled and self._settings.cancel == "sigkill")
            if must_end or (kill_at is not None and now >= kill_at):
                for process in processes:
                    process.kill()
                continue
            if job.is_cancelled and not is_told:
                kill_at, is_told = now + self._settings.grace, True
                for process in processes:
                    process.terminate()
            if kill_at is None and any(codes):
                kill_at = now + self._settings.peers
            with self._jobs.changed:
                self._jobs.changed.wait(_LOOK_SECONDS)
        return [code for code in codes if code is not None]

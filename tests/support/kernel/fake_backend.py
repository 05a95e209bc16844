"""A fake backend that a test scripts; it starts no process.

The fake passes `suite`, so if code works with it and fails with another backend, the cause is that
backend. It is deterministic: it reads neither the time nor random numbers.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import (
    Attempt,
    AttemptPhase,
    AttemptRef,
    Backend,
    BackendContext,
    Found,
    Handle,
    Observation,
    Request,
    Written,
)
from finetune_operator.errors import AlreadyOwnedError, BackendError, NoSuchRankError
from finetune_operator.planner.plan import Plan
from finetune_trainer.config import ExitCode, FailureClass, Progress, Termination

RUNNING = Observation(AttemptPhase.RUNNING, nodes_ready=1, requeue_seconds=0.0)


def ended(
    exit_code: int = ExitCode.DONE,
    failure_class: FailureClass = FailureClass.COMPLETED,
    message: str = "trained to the end",
    *,
    progress: Progress | None = None,
) -> Observation:
    """Return the observation of an attempt that ended with an exit code and no live process."""
    return Observation(
        AttemptPhase.SUCCEEDED if exit_code == ExitCode.DONE else AttemptPhase.FAILED,
        all_gone=True,
        termination=Termination(failure_class=failure_class, exit_code=exit_code, message=message),
        progress=progress,
        requeue_seconds=0.0,
    )


PREEMPTED = ended(ExitCode.PREEMPTED, FailureClass.PREEMPTED, "stopped with a checkpoint")


@dataclass
class FakeRun:
    """A submitted attempt.

    Attributes:
        request: The submitted request.
        script: Results of `observe`, in order; the last one is repeated.
        cancels: The `until` of each `cancel` so far.
        lines: Log lines by rank.
        artifacts: Result of `collect`.
    """

    request: Request
    script: list[Observation]
    cancels: list[datetime] = field(default_factory=list)
    lines: dict[int, list[str]] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        """Whether a process of the attempt would still run."""
        return not self.script[0].all_gone


class FakeBackend(Backend):
    """Backend `fake`.

    Args:
        context: Unused; every backend takes it.
        scripts: Script of each attempt by number; an attempt without a script stays `RUNNING`.

    Attributes:
        runs: All submitted attempts by name; a test may change a script at any time.
        errors: Errors that the next calls of a verb raise, by verb and in order, before the verb
            has any effect.
        after_cancel: Observation of a cancelled attempt.
        accepts_cancel: Result of `cancel`; if False, the call has no effect.
    """

    name: ClassVar[str] = "fake"
    needs_finalizer: ClassVar[bool] = True
    finds_from_cache: ClassVar[bool] = False
    runs_without_cluster: ClassVar[bool] = False

    def __init__(
        self,
        context: BackendContext | None = None,
        *,
        scripts: Mapping[int, Sequence[Observation]] | None = None,
    ) -> None:
        self.context = context or BackendContext(Path())
        self.runs: dict[str, FakeRun] = {}
        self.errors: dict[str, list[BackendError]] = {}
        self.after_cancel = PREEMPTED
        self.accepts_cancel = True
        self._scripts = dict(scripts or {})

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """Accept every job."""
        return ()

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """Return the checkpoint and output folders, placed by their URIs."""
        return folders_named_by_uri(job)

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return a request with the size of the attempt."""
        metadata = plan.job.metadata
        return Request(
            backend=self.name,
            job_uid=metadata.uid,
            attempt=attempt.number,
            name=f"{metadata.namespace}/{metadata.name}-{attempt.number}",
            objects=({"kind": "Fake", "nodes": plan.nodes, "worldSize": plan.world_size},),
        )

    async def submit(self, request: Request) -> Handle:
        """Start the script of the attempt, unless it has been submitted before."""
        self._raise("submit")
        existing = self.runs.get(request.name)
        if existing is not None and existing.request.job_uid != request.job_uid:
            owner = existing.request.job_uid
            raise AlreadyOwnedError(f"{request.name} belongs to job {owner}; rename this job")
        if existing is None:
            script = list(self._scripts.get(request.attempt, (RUNNING,)))
            self.runs[request.name] = FakeRun(request, script)
        return Handle(kind="Fake", name=request.name, uid=_uid(request))

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Return the attempt if it has been submitted."""
        self._raise("find")
        for run in self.runs.values():
            request = run.request
            if (request.job_uid, request.attempt) == (job.metadata.uid, attempt.number):
                return Found(Handle(kind="Fake", name=request.name, uid=_uid(request)))
        return None

    async def observe(self, ref: AttemptRef) -> Observation:
        """Return the present entry of the script, and advance the script."""
        self._raise("observe")
        run = self._run(ref)
        if run is None:
            return Observation(AttemptPhase.UNKNOWN, all_gone=True, message="never submitted")
        return run.script.pop(0) if len(run.script) > 1 else run.script[0]

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Record the time; the first call replaces the script of a live attempt."""
        self._raise("cancel")
        run = self._run(ref)
        if run is None or not self.accepts_cancel:
            return self.accepts_cancel
        if run.is_alive and not run.cancels:
            run.script[:] = [self.after_cancel]
        run.cancels.append(until)
        return True

    async def logs(self, ref: AttemptRef, rank: int, follow: bool = False) -> AsyncIterator[str]:
        """Yield the rank's lines."""
        run = self._run(ref)
        if run is None or rank not in run.lines:
            known = ", ".join(map(str, run.lines)) if run is not None and run.lines else "none"
            raise NoSuchRankError(f"rank {rank} does not exist; {ref.handle.name} has {known}")
        for line in run.lines[rank]:
            yield line

    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return the run's artifacts."""
        self._raise("collect")
        run = self._run(ref)
        return tuple(run.artifacts) if run else ()

    @property
    def alive(self) -> list[FakeRun]:
        """Attempts with a process that would still run."""
        return [run for run in self.runs.values() if run.is_alive]

    def run(self, number: int) -> FakeRun:
        """Return the attempt with a number, for tests with one job."""
        return next(run for run in self.runs.values() if run.request.attempt == number)

    def _run(self, ref: AttemptRef) -> FakeRun | None:
        run = self.runs.get(ref.handle.name)
        return run if run is not None and _uid(run.request) == ref.handle.uid else None

    def _raise(self, verb: str) -> None:
        if self.errors.get(verb):
            raise self.errors[verb].pop(0)


def folders_named_by_uri(job: FineTuneJob) -> Sequence[Written]:
    """Return the checkpoint and output folders of a job, placed by their URIs."""
    named = {"checkpoint": job.spec.checkpoint.uri, "output": job.spec.output.uri}
    return [
        Written(f"spec.{block}.uri", uri, tuple(part for part in uri.split("/") if part))
        for block, uri in named.items()
        if uri is not None
    ]


def _uid(request: Request) -> str:
    return f"{request.job_uid}-{request.attempt}"

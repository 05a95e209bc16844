"""Run attempts behind a REST service: a backend to copy.

A single task polls the list of all runs and wakes the jobs of changed runs, so `observe` sends no
request. `submit` looks up the run by name before it creates one. No verb retries or waits; every
failed request becomes a `TransientError`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from typing import ClassVar, ParamSpec, TypeVar

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import (
    Attempt,
    AttemptPhase,
    AttemptRef,
    Backend,
    BackendContext,
    Effect,
    Found,
    Handle,
    Limits,
    Observation,
    Obstacle,
    Request,
    Services,
    Written,
)
from finetune_operator.errors import AlreadyOwnedError, NoSuchRankError, TransientError
from finetune_operator.kube.cache import Key
from finetune_operator.planner.plan import Plan
from finetune_trainer.config import FailureClass
from remote_backend.service import JOB_UID, RemoteRun, RunState, ServiceClient, ServiceError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 5.0
REQUEST_SECONDS = 5.0
"""Timeout of a request; a request that times out may still take effect."""

SILENCE_SECONDS = 60.0
"""Jobs report the service as silent if every poll has failed for so long."""

_FAILURE_CLASSES = {
    "Preempted": FailureClass.PREEMPTED,
    "ServiceError": FailureClass.SERVICE_FAILED,
}
"""Failure classes by the service's error; the cause of any other error is unknown."""


class RemoteBackend(Backend):
    """Backend `remote`.

    Args:
        context: Unused; every backend takes it.
        service: Client of the service.
        poll_seconds: Interval between two polls.
        request_seconds: Timeout of a request.
    """

    name: ClassVar[str] = "remote"
    needs_finalizer: ClassVar[bool] = True
    finds_from_cache: ClassVar[bool] = False
    runs_without_cluster: ClassVar[bool] = False
    limits: ClassVar[Limits] = Limits(late_submit=120.0, unconfirmed_cancel=300.0)

    def __init__(
        self,
        context: BackendContext,
        service: ServiceClient,
        *,
        poll_seconds: float = POLL_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._service = service
        self._poll_seconds = poll_seconds
        self._request_seconds = request_seconds
        self._services: Services | None = None
        self._poller: asyncio.Task[None] | None = None
        self._runs: dict[str, RemoteRun] | None = None  # None until the first list
        self._newer: dict[str, RemoteRun] = {}  # from responses since the last list request
        self._silence = ""

    async def start(self, services: Services) -> None:
        """Start to poll."""
        self._services = services
        self._poller = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop polling; no request is sent from now on."""
        self._services = None
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait([self._poller])

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """Accept every job: the service has no limits of its own."""
        return ()

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """Return the checkpoint and output folders; the service takes their URIs as they are."""
        uris = {"checkpoint": job.spec.checkpoint.uri, "output": job.spec.output.uri}
        return [
            Written(f"spec.{block}.uri", uri, tuple(part for part in uri.split("/") if part))
            for block, uri in uris.items()
            if uri is not None
        ]

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return the run's name and tags."""
        job = plan.job.metadata
        tags = {"namespace": job.namespace, "job": job.name, JOB_UID: job.uid}
        name = _run_name(plan.job, attempt)
        tags |= {"attempt": str(attempt.number), "nodes": str(plan.nodes)}
        return Request(self.name, job.uid, attempt.number, name, ({"name": name, "tags": tags},))

    async def submit(self, request: Request) -> Handle:
        """Adopt the run of that name, or create it."""
        (body,) = request.objects
        run = self._known(request.name) or await self._send(self._service.get, request.name)
        if run is None:
            run = await self._write(self._service.create, request.name, body["tags"])
        if run.tags[JOB_UID] != request.job_uid:
            owner = run.tags[JOB_UID]
            raise AlreadyOwnedError(f"run {run.name} belongs to job {owner}; rename this job")
        self._record(run)
        return _handle(run)

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Get the run by name: the last list may be older than the run."""
        run = await self._send(self._service.get, _run_name(job, attempt))
        if run is None or run.tags[JOB_UID] != job.metadata.uid:
            return None
        self._record(run)
        return Found(_handle(run), run.created)

    async def observe(self, ref: AttemptRef) -> Observation:
        """Return the state from the last list, or from a later response."""
        run = self._run(ref)
        if run is None:
            return Observation(AttemptPhase.UNKNOWN, all_gone=True, message="the run is gone")
        return _observation(run, self._silence)

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Request a stop, unless the service has already accepted an earlier one."""
        known = self._run(ref)
        if known is None or _stops_by(known, until):
            return True
        run = await self._write(self._service.cancel, ref.handle.name, until)
        if run is None:
            return True
        self._record(run)
        return _stops_by(run, until)

    async def logs(self, ref: AttemptRef, rank: int, follow: bool = False) -> AsyncIterator[str]:
        """Yield the lines of rank 0; the service stores no other log."""
        if rank:
            raise NoSuchRankError(f"rank {rank} does not exist; {ref.handle.name} has rank 0 alone")
        run = await self._send(self._service.get, ref.handle.name)
        for line in run.lines if run else ():
            yield line

    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return the URIs that the run exported."""
        run = self._run(ref)
        return run.outputs if run else ()

    async def _poll(self) -> None:
        """Poll until cancelled."""
        loop = asyncio.get_running_loop()
        polled_at = loop.time()
        while True:
            wait, error = self._poll_seconds, ""
            try:
                await self._poll_once()
            except TransientError as failed:
                wait, error = max(wait, failed.retry_after or 0.0), str(failed)
            except Exception as failed:  # a bug here; every job would stall if polling stopped
                log.exception("poll failed")
                error = f"runs cannot be listed ({type(failed).__name__}: {failed})"
            if not error:
                polled_at = loop.time()
            is_silent = self._runs is None or loop.time() - polled_at >= SILENCE_SECONDS
            self._report_silence(error if is_silent else "")
            await asyncio.sleep(wait)

    async def _poll_once(self) -> None:
        """Replace the known runs by the listed ones, and wake the jobs of changed runs.

        A response that arrives while the list request is in flight may be newer than the list.
        """
        self._newer.clear()
        listed = await self._send(self._service.list_runs)
        before, self._runs = self._runs or {}, {**listed, **self._newer}
        for name, run in {**before, **self._runs}.items():
            if before.get(name) != self._runs.get(name):
                self._wake(run)

    def _report_silence(self, error: str) -> None:
        """Wake the jobs of live runs when the service falls silent or responds again.

        The first error is reported until then, so each job writes its status once.
        """
        if bool(error) == bool(self._silence):
            return
        self._silence = error
        for run in (self._runs or {}).values():
            if not run.is_final:
                self._wake(run)

    def _wake(self, run: RemoteRun) -> None:
        if self._services is not None:
            self._services.wake(Key(run.tags["namespace"], run.tags["job"]))

    def _known(self, name: str) -> RemoteRun | None:
        return (self._runs or {}).get(name)

    def _run(self, ref: AttemptRef) -> RemoteRun | None:
        """Return the run of an attempt; None if it does not exist.

        Raises:
            TransientError: this process has not listed the runs yet.
        """
        if self._runs is None:
            raise TransientError(self._silence or "the runs of the service are not listed yet")
        run = self._known(ref.handle.name)
        return run if run is not None and run.tags[JOB_UID] == ref.handle.uid else None

    def _record(self, run: RemoteRun) -> None:
        """Record a response; a list request in flight may return an older state."""
        self._newer[run.name] = run
        if self._runs is not None:
            self._runs[run.name] = run

    async def _write(
        self, request: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Send a write request, which only the leader may.

        Raises:
            NotLeadingError: this process no longer leads.
            TransientError: see `_send`.
        """
        if self._services is not None:
            self._services.check_may_write()
        return await self._send(request, *args, **kwargs)

    async def _send(
        self, request: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Send one request and return the result.

        Raises:
            TransientError: an error response, a timeout, or this backend is closed.
        """
        if self._services is None:
            raise TransientError("the backend is closed")
        try:
            async with asyncio.timeout(self._request_seconds):
                return await request(*args, **kwargs)
        except TimeoutError:
            message = f"the service did not respond within {self._request_seconds:g} s"
            raise TransientError(message) from None
        except ServiceError as error:
            raise TransientError(
                f"request to the service failed: {error}", error.retry_after
            ) from error


def _run_name(job: FineTuneJob, attempt: Attempt) -> str:
    """Return a name unique to the attempt: the service never reuses a name."""
    return f"{job.metadata.name}-{job.metadata.uid}-{attempt.number}"


def _handle(run: RemoteRun) -> Handle:
    return Handle("Run", run.name, run.tags[JOB_UID], f"https://service.test/runs/{run.name}")


def _stops_by(run: RemoteRun, until: datetime) -> bool:
    """Whether the service has promised that no process is alive after `until`."""
    return run.is_final or (run.cancel_until is not None and run.cancel_until <= until)


def _observation(run: RemoteRun, silence: str) -> Observation:
    if run.state is RunState.COMPLETED:
        return Observation(AttemptPhase.SUCCEEDED, all_gone=True, message="the run has completed")
    if run.is_final:
        return Observation(
            AttemptPhase.FAILED,
            all_gone=True,
            failure_class=_failure_class(run),
            message=f"the run is {run.state}{f': {run.error}' if run.error else ''}",
        )
    queued = Obstacle("Queued", "the run waits in the service's queue", Effect.QUEUED)
    is_running = run.state is not RunState.QUEUED
    obstacle = None if is_running else queued
    return Observation(
        AttemptPhase.RUNNING if is_running else AttemptPhase.PENDING,
        nodes_ready=int(run.tags["nodes"]) if is_running else 0,
        disruptions=run.moves,
        is_training=is_running,
        obstacle=Obstacle("ServiceSilent", silence) if silence else obstacle,
    )


def _failure_class(run: RemoteRun) -> FailureClass:
    """Return the cause of a failure; a run cancelled by another client is not restarted."""
    if run.state is RunState.FAILED:
        return _FAILURE_CLASSES.get(run.error, FailureClass.UNKNOWN)
    return FailureClass.PREEMPTED if run.cancel_until else FailureClass.DO_NOT_RESTART

"""A backend whose attempts run behind a REST service: the model for one that you write.

One request at an interval lists all attempts, so that observing none of them asks for anything;
what has changed wakes its job. Who submits looks for the attempt by its name first. No verb retries
or waits: what cannot be said now is a `TransientError`.
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
from finetune_operator.testing.fake import folders_named_by_uri
from finetune_operator.testing.remote_service import (
    JOB_UID,
    RemoteRun,
    RunState,
    ServiceClient,
    ServiceError,
)
from finetune_trainer.config import FailureClass

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 5.0
REQUEST_SECONDS = 5.0
"""A request that was not answered for so long is given up; it may take effect nevertheless."""

SILENCE_SECONDS = 60.0
"""Silence of the service that is told to the jobs."""

_CLASSES = {"Preempted": FailureClass.PREEMPTED, "ServiceError": FailureClass.SERVICE_FAILED}
"""Of the service's own words; what it says besides explains nothing."""


class RemoteBackend(Backend):
    """Backend `remote`.

    Args:
        context: Kept for the signature of the contract; unused.
        service: Whom it asks.
        poll_seconds: Between two lists.
        request_seconds: How long it waits for an answer.
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
        self._runs: dict[str, RemoteRun] | None = None  # None until they were listed
        self._answered: dict[str, RemoteRun] = {}  # by what came since the last list was sent
        self._silence = ""

    async def start(self, services: Services) -> None:
        """Begin to list what there is."""
        self._services = services
        self._poller = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Ask for nothing any more."""
        self._services = None
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait([self._poller])

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """Return every capability."""
        return ()

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """Use the URIs as folders."""
        return folders_named_by_uri(job)

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return the run's name and tags."""
        job = plan.job.metadata
        tags = {"namespace": job.namespace, "job": job.name, JOB_UID: job.uid}
        name = _run_name(plan.job, attempt)
        tags |= {"attempt": str(attempt.number), "nodes": str(plan.nodes)}
        made = {"name": name, "tags": tags}
        return Request(self.name, job.uid, attempt.number, name, (made,))

    async def submit(self, request: Request) -> Handle:
        """Adopt the run of that name, or create it."""
        (made,) = request.objects
        run = self._known(request.name) or await self._ask(self._service.get, request.name)
        if run is None:
            run = await self._write(self._service.create, request.name, made["tags"])
        if run.tags[JOB_UID] != request.job_uid:
            owner = run.tags[JOB_UID]
            raise AlreadyOwnedError(f"run {run.name} belongs to job {owner}; rename this job")
        self._note(run)
        return _handle(run)

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Ask for the run by its name: the last list may be older than it."""
        run = await self._ask(self._service.get, _run_name(job, attempt))
        if run is None or run.tags[JOB_UID] != job.metadata.uid:
            return None
        self._note(run)
        return Found(_handle(run), run.created)

    async def observe(self, ref: AttemptRef) -> Observation:
        """Tell what was listed last, or answered since."""
        run = self._run(ref)
        if run is None:
            return Observation(AttemptPhase.UNKNOWN, all_gone=True, message="the run is gone")
        return _seen(run, self._silence)

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Ask the service to stop the run, unless it has accepted that already."""
        known = self._run(ref)
        if known is None or _stops_by(known, until):
            return True
        run = await self._write(self._service.cancel, ref.handle.name, until)
        if run is None:
            return True
        self._note(run)
        return _stops_by(run, until)

    async def logs(self, ref: AttemptRef, rank: int, follow: bool = False) -> AsyncIterator[str]:
        """Yield the lines of rank 0, the only one that the service keeps."""
        if rank:
            raise NoSuchRankError(f"rank {rank} does not exist; {ref.handle.name} has rank 0 alone")
        run = await self._ask(self._service.get, ref.handle.name)
        for line in run.lines if run else ():
            yield line

    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return what the run says that it exported."""
        run = self._run(ref)
        return run.outputs if run else ()

    async def _poll(self) -> None:
        """List all runs at an interval, until cancelled."""
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while True:
            wait, error = self._poll_seconds, ""
            try:
                await self._list()
            except TransientError as failed:
                wait, error = max(wait, failed.retry_after or 0.0), str(failed)
            except Exception as failed:  # a fault of ours; without lists no job would go on
                log.exception("runs not listed")
                error = f"runs cannot be listed ({type(failed).__name__}: {failed})"
            if not error:
                heard_at = loop.time()
            is_silent = self._runs is None or loop.time() - heard_at >= SILENCE_SECONDS
            self._tell_silence(error if is_silent else "")
            await asyncio.sleep(wait)

    async def _list(self) -> None:
        """Replace what is known by what the service lists, and wake the jobs of what has changed.

        What was answered while the list was on its way may be newer than the list.
        """
        self._answered.clear()
        listed = await self._ask(self._service.list_runs)
        before, self._runs = self._runs or {}, {**listed, **self._answered}
        for name, run in {**before, **self._runs}.items():
            if before.get(name) != self._runs.get(name):
                self._wake(run)

    def _tell_silence(self, error: str) -> None:
        """Wake the jobs whose runs have not ended, when the service falls silent or is heard again.

        The sentence stays as it began, so that it is written once.
        """
        if bool(error) == bool(self._silence):
            return
        self._silence = error
        for run in (self._runs or {}).values():
            if not run.has_ended:
                self._wake(run)

    def _wake(self, run: RemoteRun) -> None:
        if self._services is not None:
            self._services.wake(Key(run.tags["namespace"], run.tags["job"]))

    def _known(self, name: str) -> RemoteRun | None:
        return (self._runs or {}).get(name)

    def _run(self, ref: AttemptRef) -> RemoteRun | None:
        """Return the run as it is known, or None where there is none.

        Raises:
            TransientError: this process has not heard of any run yet.
        """
        if self._runs is None:
            raise TransientError(self._silence or "the service was not asked for its runs yet")
        run = self._known(ref.handle.name)
        return run if run is not None and run.tags[JOB_UID] == ref.handle.uid else None

    def _note(self, run: RemoteRun) -> None:
        """Keep an answer, also if a list that is on its way does not hold it yet."""
        self._answered[run.name] = run
        if self._runs is not None:
            self._runs[run.name] = run

    async def _write(
        self, request: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Ask for a change, which only the leader may.

        Raises:
            NotLeadingError: this process does not lead any more.
            TransientError: as of `_ask`.
        """
        if self._services is not None:
            self._services.check_may_write()
        return await self._ask(request, *args, **kwargs)

    async def _ask(
        self, request: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Send one request and return its answer.

        Raises:
            TransientError: the service throttles or does not answer, or this backend was closed.
        """
        if self._services is None:
            raise TransientError("the backend is closed")
        try:
            async with asyncio.timeout(self._request_seconds):
                return await request(*args, **kwargs)
        except TimeoutError:
            sentence = f"the service has not answered in {self._request_seconds:g} s"
            raise TransientError(sentence) from None
        except ServiceError as error:
            raise TransientError(f"the service says: {error}", error.retry_after) from error


def _run_name(job: FineTuneJob, attempt: Attempt) -> str:
    """Return a name that no other job's run has: those of the service are never free again."""
    return f"{job.metadata.name}-{job.metadata.uid}-{attempt.number}"


def _handle(run: RemoteRun) -> Handle:
    return Handle("Run", run.name, run.tags[JOB_UID], f"https://service.test/runs/{run.name}")


def _stops_by(run: RemoteRun, until: datetime) -> bool:
    """Say whether the service has promised that the run has ended by then."""
    return run.has_ended or (run.cancel_until is not None and run.cancel_until <= until)


def _seen(run: RemoteRun, silence: str) -> Observation:
    if run.state is RunState.COMPLETED:
        return Observation(AttemptPhase.SUCCEEDED, all_gone=True, message="the run has completed")
    if run.has_ended:
        return Observation(
            AttemptPhase.FAILED,
            all_gone=True,
            failure_class=_class_of(run),
            message=f"the run is {run.state}{f': {run.error}' if run.error else ''}",
        )
    queued = Obstacle("Queued", "the run waits in the service's queue", Effect.QUEUED)
    runs = run.state is not RunState.QUEUED
    obstacle = None if runs else queued
    return Observation(
        AttemptPhase.RUNNING if runs else AttemptPhase.PENDING,
        nodes_ready=int(run.tags["nodes"]) if runs else 0,
        disruptions=run.moves,
        is_training=runs,
        obstacle=Obstacle("ServiceSilent", silence) if silence else obstacle,
    )


def _class_of(run: RemoteRun) -> FailureClass:
    """Return why a run has failed; whoever cancels one that we did not means it."""
    if run.state is RunState.FAILED:
        return _CLASSES.get(run.error, FailureClass.UNKNOWN)
    return FailureClass.PREEMPTED if run.cancel_until else FailureClass.DO_NOT_RESTART

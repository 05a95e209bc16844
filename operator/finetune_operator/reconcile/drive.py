"""Drive one job to its end without a cluster: observe, decide, act, again.

`ftctl run` calls `opening.open_job`, then `drive`; the operator's kernel does the same with a queue
of jobs. Every decision is `decide`'s; here is only the order in which things are saved and done.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.backends.base import (
    Attempt,
    AttemptPhase,
    Backend,
    Observation,
)
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.errors import BackendError, TransientError
from finetune_operator.planner.plan import Plan, make_plan
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import (
    Reason,
    Situation,
    Stage,
    describe,
    is_settled,
    rfc3339,
)
from finetune_operator.reconcile.decide import Cancel, Collect, Decision, Submit, decide
from finetune_trainer.config import ExitCode, FailureClass, Termination

RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0

OnChange = Callable[[FineTuneJob, Observation | None], None]


class Clock(Protocol):
    """Time, as `drive` needs it."""

    def now(self) -> datetime:
        """Return the time, with a zone."""

    async def wait(self, event: asyncio.Event, seconds: float | None) -> None:
        """Return when the event is set or the time is over; None waits for the event alone."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Return the time in UTC."""
        return datetime.now(UTC)

    async def wait(self, event: asyncio.Event, seconds: float | None) -> None:
        """Wait on the event loop."""
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return


SYSTEM_CLOCK = SystemClock()


class StopRequest:
    """A person's wish to stop the job; call its methods on the event loop's thread.

    Attributes:
        is_requested: Stop with a checkpoint; the next run goes on from it.
        is_forced: Kill now; the next run goes on from the last committed checkpoint.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.is_forced = False
        self.changed = asyncio.Event()

    def request(self) -> None:
        """Ask for a graceful stop, as `spec.suspend: true` would."""
        self.is_requested = True
        self.changed.set()

    def force(self) -> None:
        """Ask for an immediate stop."""
        self.is_requested = self.is_forced = True
        self.changed.set()


async def drive(
    job: FineTuneJob,
    backend: Backend,
    store: RunFolder,
    *,
    on_change: OnChange,
    stop: StopRequest,
    clock: Clock = SYSTEM_CLOCK,
) -> FineTuneJob:
    """Drive `job` until it is Complete, Failed or Suspended, and return it as it is then.

    Cancelling this coroutine, or killing the process, leaves a running attempt running: the next
    `drive` adopts it.

    Args:
        job: As `open_job` returned it.
        backend: Who runs it.
        store: The job's store, locked by the caller.
        on_change: Called with each change of the job or of what is seen of it.
        stop: A person's wish to stop it.
        clock: Time.

    Raises:
        InvalidJobError: no plan can satisfy the job.
        BackendError: the backend cannot say or do something it must.
    """
    driver = _Driver(make_plan(job), backend, store, clock, stop)
    seen: tuple[FineTuneJob, Observation | None] | None = None
    while True:
        if stop.is_requested and not job.spec.suspend:
            job = job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": True})})
            store.save(job)
        stop.changed.clear()
        observation = await driver.observe(job)
        decision = decide(job, observation, clock.now(), driver.plan)
        job, wait = await driver.carry_out(job, decision)
        if seen != (job, observation):
            seen = (job, observation)
            on_change(*seen)
        if is_settled(job.status):
            return job
        await clock.wait(stop.changed, wait)


def refuse(job: FineTuneJob, message: str, now: datetime) -> FineTuneJobStatus:
    """Return the status of a job whose attempt the backend will never create; Failed is final."""
    words = Termination(
        failure_class=FailureClass.CONFIG_ERROR, exit_code=ExitCode.CONFIG, message=message
    )
    status = attempts.close(job.status, words, "", now)
    status = status.model_copy(update={"completion_time": rfc3339(now)})
    situation, has_queue = Situation(Stage.FAILED, Reason.REFUSED, message), bool(job.spec.queue)
    return describe(status, situation, now, job.metadata.generation, has_queue=has_queue)


class _Driver:
    """What `drive` does the same way in every round."""

    def __init__(
        self, plan: Plan, backend: Backend, store: RunFolder, clock: Clock, stop: StopRequest
    ) -> None:
        self.plan = plan
        self._backend = backend
        self._store = store
        self._clock = clock
        self._stop = stop
        self._retry_seconds = RETRY_SECONDS

    async def observe(self, job: FineTuneJob) -> Observation | None:
        """Look at the open attempt; a passing failure to look is told as `Unknown`."""
        handle = handle_of(job.status)
        if handle is None or is_settled(job.status):
            return None
        try:
            return await self._backend.observe(handle)
        except TransientError as error:
            return Observation(
                AttemptPhase.UNKNOWN, message=str(error), look_again_seconds=RETRY_SECONDS
            )

    async def carry_out(
        self, job: FineTuneJob, decision: Decision
    ) -> tuple[FineTuneJob, float | None]:
        """Save the decision's status and act; return the job and how long to wait.

        An attempt is saved before it is submitted, so a crash between the two submits it again and
        adopts it. What a completed attempt exported is asked before Complete is saved, so a crash
        between the two asks again.
        """
        status = decision.status
        handle = handle_of(job.status)
        if handle is not None and any(isinstance(act, Collect) for act in decision.actions):
            artifacts = list(await self._backend.collect(handle))
            status = status.model_copy(update={"artifacts": artifacts})
        job = self._saved(job, status)
        wait = decision.requeue_seconds
        for action in decision.actions:
            if isinstance(action, Submit):
                job, wait = await self._submit(job, action.number)
            elif isinstance(action, Cancel) and handle is not None:
                grace = 0.0 if self._stop.is_forced else action.grace_seconds
                await self._backend.cancel(handle, grace)
        return job, wait

    async def _submit(self, job: FineTuneJob, number: int) -> tuple[FineTuneJob, float]:
        request = self._backend.render(self.plan, Attempt(number))
        try:
            handle = await self._backend.submit(request)
        except TransientError:
            wait, longer = self._retry_seconds, self._retry_seconds * 2
            self._retry_seconds = min(longer, MAX_RETRY_SECONDS)
            return job, wait
        except BackendError as error:
            return self._saved(job, refuse(job, str(error), self._clock.now())), 0.0
        self._retry_seconds = RETRY_SECONDS
        return self._saved(job, attempts.with_handle(job.status, handle)), 0.0

    def _saved(self, job: FineTuneJob, status: FineTuneJobStatus) -> FineTuneJob:
        if status == job.status:
            return job
        job = job.model_copy(update={"status": status})
        self._store.save(job)
        return job

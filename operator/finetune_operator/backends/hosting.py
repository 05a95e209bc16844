"""A backend as the operator calls it: started once, each verb within its time, closed at the end.

`Backends` makes one of each. What holds for every verb of every backend stands here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TypeVar

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import (
    Attempt,
    AttemptRef,
    Backend,
    Found,
    Handle,
    Observation,
    Request,
    Written,
)
from finetune_operator.backends.registry import cause_of
from finetune_operator.backends.services import HostedServices
from finetune_operator.backends.threads import BlockingCalls
from finetune_operator.errors import BrokenBackendError, FineTuneError, TransientError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.errors import NotLeadingError
from finetune_operator.planner.plan import Plan

log = logging.getLogger(__name__)

T = TypeVar("T")

START_AGAIN_SECONDS = 10.0
"""How long a backend that could not be started is left alone, unless its service says more."""

_CLOSE_SECONDS = 5.0
_CHECK_THREADS = 4


class HostedBackend:
    """One backend in one term of the operator.

    Args:
        name: What it is registered as.
        backend: Keeps the contract.
        wake: Has a job reconciled.
        seconds_to_write: As `ClientOptions` has it.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        wake: Callable[[Key], None],
        seconds_to_write: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self.backend = backend
        self._title = f"spec.backend.type {name}"
        self._wake = wake
        self._seconds_to_write = seconds_to_write
        self._checks = BlockingCalls(self._title, _CHECK_THREADS)
        self._services: HostedServices | None = None
        self._starting = asyncio.Lock()
        self._fault: FineTuneError | None = None
        self._start_at = 0.0
        self._is_closed = False

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """List what the backend cannot do."""
        return self.backend.validate(job)

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """List the folders that the job writes."""
        return self.backend.writes(job)

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return what `submit` would create."""
        return self.backend.render(plan, attempt)

    async def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        """List what is wrong with what the job names; the event loop goes on meanwhile."""
        await self._start()
        if type(self.backend).check_inputs is Backend.check_inputs:
            return ()
        seconds = self.backend.limits.check_inputs
        return await self._checks.run(
            "check_inputs", lambda: self.backend.check_inputs(job), seconds
        )

    async def submit(self, request: Request) -> Handle:
        """Create the attempt, or adopt it."""
        limit = self.backend.limits.submit
        return await self._call("submit", limit, lambda: self.backend.submit(request))

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Return the job's own attempt where it exists."""
        limit = self.backend.limits.find
        return await self._call("find", limit, lambda: self.backend.find(job, attempt))

    async def observe(self, ref: AttemptRef) -> Observation:
        """Observe the attempt."""
        limit = self.backend.limits.observe
        return await self._call("observe", limit, lambda: self.backend.observe(ref))

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Ask the attempt to stop with a checkpoint; return whether that was accepted."""
        limit = self.backend.limits.cancel
        return await self._call("cancel", limit, lambda: self.backend.cancel(ref, until))

    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return URIs of what the attempt exported."""
        limit = self.backend.limits.collect
        return await self._call("collect", limit, lambda: self.backend.collect(ref))

    def forget(self, job_uid: str) -> None:
        """Drop what is kept in memory about a job."""
        self.backend.forget(job_uid)

    async def close(self) -> None:
        """Close the backend if it was started; no verb is called any more."""
        self._is_closed = True
        if self._services is None:
            return
        self._services.close()
        try:
            await self._within("close", _CLOSE_SECONDS, self.backend.close)
        except Exception:
            log.exception("backend not closed", extra={"backend": self.name})

    async def _call(self, verb: str, limit: float, call: Callable[[], Awaitable[T]]) -> T:
        """Have the backend started, and return what the verb returns.

        Raises:
            TransientError: it took too long, or the backend cannot be started now.
            BrokenBackendError: the backend cannot be started until somebody fixes it.
        """
        await self._start()
        return await self._within(verb, limit, call)

    async def _within(self, verb: str, seconds: float, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await call()
        except TimeoutError as error:
            if not limit.expired():
                raise  # the backend's own
            raise TransientError(
                f"{self._title}: {verb} took more than {seconds:g} s; see that what it asks can "
                "be reached"
            ) from error

    async def _start(self) -> None:
        """Start the backend, unless it was; several first jobs wait for the same start."""
        if self._services is not None and not self._is_closed:
            return
        async with self._starting:
            if self._is_closed:
                raise NotLeadingError(f"{self._title} is not asked, as this term has ended")
            if self._services is not None:
                return
            left = self._start_at - asyncio.get_running_loop().time()
            if self._fault is None or left <= 0:
                self._fault = await self._try_to_start()
                if self._fault is None:
                    return
                left = max(START_AGAIN_SECONDS, self._fault.retry_after or 0.0)
                self._start_at = asyncio.get_running_loop().time() + left
            if self._fault.retryable:
                raise TransientError(str(self._fault), left) from self._fault
            raise BrokenBackendError(str(self._fault)) from self._fault

    async def _try_to_start(self) -> FineTuneError | None:
        """Start the backend; return what keeps it from that."""
        backend, fault = self.backend, None
        services = HostedServices(self._title, backend.threads, self._wake, self._seconds_to_write)
        try:
            await self._within("start", backend.limits.start, lambda: backend.start(services))
        except FineTuneError as error:
            fault = error
        except Exception as error:
            fault = BrokenBackendError(
                f"{self._title} cannot be started ({cause_of(error, type(backend).__module__)}); "
                "fix that, or use another backend"
            )
            fault.__cause__ = error
        if fault is None:
            self._services = services
            return None
        services.close()
        extra = {"backend": self.name, "error": str(fault)}
        log.warning("backend not started", extra=extra, exc_info=fault.__cause__)
        return fault

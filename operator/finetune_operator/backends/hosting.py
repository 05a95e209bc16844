"""Calls a backend for the operator: starts it once, calls verbs with a timeout, and closes it.

`Backends` creates a `HostedBackend` for each backend. Rules that apply to all verbs of all backends
are here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from finetune_operator.backends.threads import BlockingCalls, within
from finetune_operator.errors import BrokenBackendError, FineTuneError, TransientError
from finetune_operator.kube.api_errors import NotLeadingError
from finetune_operator.kube.cache import Key
from finetune_operator.planner.catalogue import GpuSize
from finetune_operator.planner.plan import Plan

log = logging.getLogger(__name__)

T = TypeVar("T")

START_AGAIN_SECONDS = 10.0
"""Delay after a failed start, unless the service asks for more."""

_CLOSE_SECONDS = 5.0
_CHECK_THREADS = 4


class HostedBackend:
    """A backend in one leader term; this object also provides its `Services`.

    Args:
        name: Its registered name.
        backend: Implements the contract.
        wake: Requeues a job; called on the event loop.
        seconds_to_write: As in `ClientOptions`; safe to call in any thread.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        wake: Callable[[Key], None] = lambda key: None,
        seconds_to_write: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self.backend = backend
        self._title = f"spec.backend.type {name}"
        self._wake = wake
        self._seconds_to_write = seconds_to_write
        self._loop: asyncio.AbstractEventLoop  # known after the start
        self._checks = BlockingCalls(self._title, _CHECK_THREADS)
        self._calls = BlockingCalls(self._title, backend.threads)
        self._starting = asyncio.Lock()
        self._fault: FineTuneError | None = None
        self._start_at = 0.0
        self._is_started = self._is_closed = False

    def wake(self, job: Key) -> None:
        """Requeue a job soon; callable from any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: self._is_closed or self._wake(job))

    def check_may_write(self) -> None:
        """Raise NotLeadingError if this process may not write; callable from any thread."""
        is_leading = self._seconds_to_write is None or self._seconds_to_write() > 0
        if self._is_closed or not is_leading:
            raise NotLeadingError(f"{self._title} may not write: this replica is not the leader")

    async def run_blocking(self, call: Callable[[], T], seconds: float) -> T:
        """Run `call` in a thread of the backend and return its result."""
        if not self.backend.threads:
            raise BrokenBackendError(f"{self._title} declares no `threads`, and calls run_blocking")
        return await self._calls.run("a blocking call", call, seconds)

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """List the features of the job that the backend lacks."""
        with self._translated_faults():
            return self.backend.validate(job)

    def gpu_sizes(self, job: FineTuneJob) -> Sequence[GpuSize]:
        """List the GPU sizes on which the job may run."""
        with self._translated_faults():
            return self.backend.gpu_sizes(job)

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """List the folders that the job writes."""
        with self._translated_faults():
            return self.backend.writes(job)

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return the objects that `submit` would create."""
        with self._translated_faults():
            return self.backend.render(plan, attempt)

    async def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        """List problems of the job's inputs without blocking the event loop."""
        await self._start()
        if type(self.backend).check_inputs is Backend.check_inputs:
            return ()
        seconds = self.backend.limits.check_inputs
        with self._translated_faults():
            return await self._checks.run(
                "check_inputs", lambda: self.backend.check_inputs(job), seconds
            )

    async def submit(self, request: Request) -> Handle:
        """Create the attempt, or adopt it."""
        return await self._call("submit", lambda: self.backend.submit(request))

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Return the job's own attempt if it exists."""
        return await self._call("find", lambda: self.backend.find(job, attempt))

    async def observe(self, ref: AttemptRef) -> Observation:
        """Observe the attempt."""
        return await self._call("observe", lambda: self.backend.observe(ref))

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Ask the attempt to stop with a checkpoint; return whether that was accepted."""
        return await self._call("cancel", lambda: self.backend.cancel(ref, until))

    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return URIs of the exported artifacts."""
        return await self._call("collect", lambda: self.backend.collect(ref))

    def forget(self, job_uid: str) -> None:
        """Drop the in-memory state of a job."""
        with self._translated_faults():
            self.backend.forget(job_uid)

    async def close(self) -> None:
        """Close the backend if it was started; no verb is called afterwards."""
        self._is_closed = True
        if not self._is_started:
            return
        try:
            await within(_CLOSE_SECONDS, f"{self._title}: close", self.backend.close)
        except Exception:
            log.exception("backend not closed", extra={"backend": self.name})

    async def _call(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        """Start the backend if necessary, call the verb and return its result.

        Raises:
            TransientError: The call took too long, or the backend cannot be started now.
            BrokenBackendError: A person must fix the backend, which cannot be started or fails.
        """
        await self._start()
        with self._translated_faults():
            return await within(getattr(self.backend.limits, verb), f"{self._title}: {verb}", call)

    @contextmanager
    def _translated_faults(self) -> Iterator[None]:
        """Convert an exception that only a bug of the backend causes into a BrokenBackendError."""
        try:
            yield
        except FineTuneError:
            raise
        except Exception as error:
            log.exception("backend failed", extra={"backend": self.name})
            raise BrokenBackendError(
                f"{self._title} failed ({type(error).__name__}: {error}); the operator's log has "
                "the traceback"
            ) from error

    async def _start(self) -> None:
        """Start the backend once; concurrent first jobs wait for the same start."""
        if self._is_started and not self._is_closed:
            return
        loop = self._loop = asyncio.get_running_loop()
        async with self._starting:
            if self._is_closed:
                raise NotLeadingError(
                    f"{self._title} is not called, because this leader term has ended"
                )
            if not self._is_started and self._start_at <= loop.time():
                self._fault = await self._try_to_start()
                self._is_started = self._fault is None
            if self._fault is None:
                return
            left = self._start_at - loop.time()
            if self._fault.retryable:
                raise TransientError(str(self._fault), left) from self._fault
            raise BrokenBackendError(str(self._fault)) from self._fault

    async def _try_to_start(self) -> FineTuneError | None:
        """Start the backend; return the error that prevents it."""
        backend = self.backend
        try:
            limit = backend.limits.start
            await within(limit, f"{self._title}: start", lambda: backend.start(self))
            return None
        except FineTuneError as error:
            fault = error
        except Exception as error:
            fault = BrokenBackendError(
                f"{self._title} cannot be started ({cause_of(error, type(backend).__module__)}); "
                "fix that, or use another backend"
            )
            fault.__cause__ = error
        wait = max(START_AGAIN_SECONDS, fault.retry_after or 0.0)
        self._start_at = self._loop.time() + wait
        extra = {"backend": self.name, "error": str(fault)}
        log.warning("backend not started", extra=extra, exc_info=fault.__cause__)
        return fault

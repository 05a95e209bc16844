"""The azureml backend on its stand-in, for the suite that every backend behind a service keeps.

The loop's clock runs faster than the service's, but not while a thread works for the loop.
"""

import asyncio
import os
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, TypeVarTuple

from azureml_service import SeenJob, ServiceClient
from azureml_service.answers import Record
from finetune_operator.backends.azureml.names import UID_TAG
from finetune_operator.backends.azureml.workspace_client import REQUESTS_PER_SECOND
from finetune_operator.backends.base import Backend
from finetune_operator.testing.service_suite import Fate, ServiceHarness
from finetune_operator.testing.suite import OTHER_UID, request_of
from support.api.builders import job
from support.azureml.azureml_cases import JOB, backend_with

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RATE = 20.0

_WRITES = ("job.put", "job.cancel", "mlflow.runs.set-tag")


class HastyLoop(asyncio.SelectorEventLoop):
    """Runs `rate` times as fast as the clock, except while a thread works for it."""

    def __init__(self, rate: float = _RATE) -> None:
        self._hasty = _Selector(rate)
        super().__init__(self._hasty)

    def time(self) -> float:
        """Return its time."""
        return self._hasty.time()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run it in a thread."""
        self._hasty.work(1)
        answer = super().run_in_executor(executor, func, *args)
        answer.add_done_callback(lambda _: self._hasty.work(-1))
        return answer


class _Selector(selectors.DefaultSelector):
    """Has the time, and waits no longer than it takes."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._fast = rate
        self._working = 0
        self._read_at, self._time = time.monotonic(), 0.0

    @property
    def _rate(self) -> float:
        return 1.0 if self._working else self._fast

    def time(self) -> float:
        before, self._read_at = self._read_at, time.monotonic()
        self._time += (self._read_at - before) * self._rate
        return self._time

    def work(self, change: int) -> None:
        """Take note that a thread begins or has ended."""
        self.time()
        self._working += change

    def select(self, timeout: float | None = None) -> list[Any]:
        return super().select(timeout and timeout / self._rate)


class AzureMLHarness(ServiceHarness):
    """How the suite gets at the backend and its service.

    Args:
        service: Where jobs are, also those of other tests.

    Attributes:
        ahead: How far the backends' clock is ahead of this machine's.
    """

    retry_after = 7.0

    def __init__(self, service: ServiceClient) -> None:
        self.service = service
        self.ahead = timedelta()
        folders = "azureml://datastores/rows/paths"
        self.job = job(
            name=f"tiny-{len(service.jobs())}",
            **JOB,
            checkpoint__uri=f"{folders}/checkpoints",
            output__uri=f"{folders}/output",
        )

    @asynccontextmanager
    async def process(self) -> AsyncIterator[Backend]:
        """Yield the backend of a new process."""
        environ = {**os.environ, REQUESTS_PER_SECOND: "100"}
        yield backend_with(environ, now=lambda: datetime.now(UTC) + self.ahead)

    async def state(self) -> Any:
        """Return what there is."""
        return [(one.name, one.state, one.properties) for one in self._jobs()]

    async def occupy(self, backend: Backend) -> None:
        """Have the name belong to another job."""
        request = request_of(self, backend)
        (made,) = request.objects
        foreign = {**made, "tags": {**made["tags"], UID_TAG: OTHER_UID}}
        await backend.submit(replace(request, objects=(foreign,)))

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test in haste."""
        with asyncio.Runner(loop_factory=HastyLoop) as runner:
            runner.run(test)

    def next_write(self, fate: Fate) -> None:
        """Have a fault at the next submit or cancel."""
        faults: dict[Fate, dict[str, Any]] = {
            Fate.THROTTLED: {"status": 429, "retry_after": self.retry_after},
            Fate.IGNORED: {"is_lost": True},
            Fate.LOST: {"is_lost": True, "is_carried_out": True},
            Fate.LATE: {"is_late": True, "delay": 3.0},
        }
        if fate in faults:
            self.service.fault("job.[pc]*", times=1, **faults[fate])

    def num_requests(self) -> int:
        """Count what came."""
        return len(self._requests())

    def num_writes(self) -> int:
        """Count what changes something."""
        return sum(one.kind in _WRITES for one in self._requests())

    def let_run(self) -> None:
        """Let the job run."""
        self.service.set_state(self._name(), "Running")

    def requeue(self) -> None:
        """Have it wait again."""
        self.service.set_state(self._name(), "Queued")

    def _name(self) -> str:
        (found,) = (one.name for one in self._jobs())
        return found

    def _jobs(self) -> list[SeenJob]:
        return [one for one in self.service.jobs() if self._is_ours(one.name)]

    def _requests(self) -> list[Record]:
        return [one for one in self.service.requests() if self._is_ours(one.name)]

    def _is_ours(self, name: str) -> bool:
        return name.startswith(f"{self.job.metadata.name}-uid")

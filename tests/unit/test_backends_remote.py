"""The remote twin keeps the contract, and tells of what its service does."""

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import virtual_time
from builders import job
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.testing.remote import RemoteBackend
from finetune_operator.testing.remote_service import JOB_UID, Fate, RemoteService
from finetune_operator.testing.service_suite import ServiceHarness, ServiceSuite
from finetune_operator.testing.suite import OTHER_UID, request_of


class RemoteHarness(ServiceHarness):
    job = job()
    retry_after = 7.0

    def __init__(self) -> None:
        self.service = RemoteService()
        self.service.latency = lambda: 0.1
        self.service.retry_after = self.retry_after

    @asynccontextmanager
    async def process(self) -> AsyncIterator[Backend]:
        yield RemoteBackend(BackendContext(Path()), self.service)

    async def state(self) -> Any:
        return dict(self.service.runs)

    async def occupy(self, backend: Backend) -> None:
        name = request_of(self, backend).name
        await self.service.create(name, {JOB_UID: OTHER_UID, "namespace": "default", "job": "x"})

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        virtual_time.run(test)

    def next_write(self, fate: Fate) -> None:
        def once(verb: str, name: str) -> Fate:
            if verb in ("list", "get"):
                return Fate.ANSWERED
            self.service.fate = lambda verb, name: Fate.ANSWERED
            return fate

        self.service.fate = once

    def num_requests(self) -> int:
        return len(self.service.requests)

    def let_run(self) -> None:
        (run,) = self.service.runs
        self.service.start(run)

    def requeue(self) -> None:
        (run,) = self.service.runs
        self.service.requeue(run)


class TestRemoteBackend(ServiceSuite):
    @pytest.fixture
    def harness(self) -> RemoteHarness:
        return RemoteHarness()

"""The remote twin keeps the contract, and tells of what its service does."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import virtual_time
from builders import job
from finetune_operator.backends.base import AttemptPhase, Backend, BackendContext
from finetune_operator.testing.remote import POLL_SECONDS, SILENCE_SECONDS, RemoteBackend
from finetune_operator.testing.remote_service import JOB_UID, Fate, RemoteService, RunState
from finetune_operator.testing.service_suite import ServiceHarness, ServiceSuite
from finetune_operator.testing.suite import OTHER_UID, Submitted, request_of, started, submitted
from finetune_trainer.config import FailureClass

READS = ("list", "get")


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
            if verb in READS:
                return Fate.ANSWERED
            self.service.fate = lambda verb, name: Fate.ANSWERED
            return fate

        self.service.fate = once

    def num_requests(self) -> int:
        return len(self.service.requests)

    def num_writes(self) -> int:
        return sum(verb not in READS for verb, _ in self.service.requests)

    def let_run(self) -> None:
        (run,) = self.service.runs
        self.service.start(run)

    def requeue(self) -> None:
        (run,) = self.service.runs
        self.service.requeue(run)


@pytest.fixture
def harness() -> RemoteHarness:
    return RemoteHarness()


class TestRemoteBackend(ServiceSuite):
    """The suite; its harness is the fixture of this file."""


def test_a_run_is_never_gone_though_a_list_is_older_than_its_creation(
    harness: RemoteHarness,
) -> None:
    chance = random.Random(0)
    harness.service.latency = lambda: chance.uniform(0.0, 2.0)

    async def work() -> None:
        async with started(harness) as (backend, lent):
            for number in range(20):
                handle = await backend.submit(request_of(harness, backend, number=number))
                attempt = Submitted(harness, backend, lent, handle)
                end = asyncio.get_running_loop().time() + POLL_SECONDS
                while asyncio.get_running_loop().time() < end:
                    assert not (await attempt.observe()).all_gone
                    await asyncio.sleep(0.1)

    virtual_time.run(work())


@pytest.mark.parametrize(
    ("state", "error", "failure"),
    [
        (RunState.FAILED, "ServiceError", FailureClass.SERVICE_FAILED),
        (RunState.FAILED, "Preempted", FailureClass.PREEMPTED),
        (RunState.FAILED, "UserError", FailureClass.UNKNOWN),
        (RunState.CANCELED, "", FailureClass.DO_NOT_RESTART),
    ],
)
def test_the_services_words_for_an_end_are_failure_classes(
    harness: RemoteHarness, state: RunState, error: str, failure: FailureClass
) -> None:
    async def work() -> None:
        async with submitted(harness) as attempt:
            harness.service.end(attempt.handle.name, state, error)
            seen = await attempt.gone()
            assert (seen.phase, seen.failure_class) == (AttemptPhase.FAILED, failure)

    virtual_time.run(work())


def test_a_service_that_falls_silent_is_told_once_and_its_jobs_are_woken(
    harness: RemoteHarness,
) -> None:
    async def work() -> None:
        async with submitted(harness) as attempt:
            await asyncio.sleep(2 * POLL_SECONDS)
            attempt.lent.woken.clear()
            harness.service.fate = lambda verb, name: Fate.IGNORED
            await asyncio.sleep(10 * SILENCE_SECONDS)
            seen = await attempt.backend.observe(attempt.ref)
            assert seen.obstacle is not None
            assert seen.obstacle.reason == "ServiceSilent"
            assert attempt.lent.woken == [attempt.ref.job]
            harness.service.fate = lambda verb, name: Fate.ANSWERED
            await asyncio.sleep(3 * POLL_SECONDS)
            assert attempt.lent.woken == [attempt.ref.job] * 2
            heard = await attempt.backend.observe(attempt.ref)
            assert heard.obstacle is not None
            assert heard.obstacle.reason == "Queued"

    virtual_time.run(work())

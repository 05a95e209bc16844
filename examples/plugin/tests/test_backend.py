"""`RemoteBackend` passes the suite, and reports the state of its service."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import jumping_clock
from fake_service import RemoteService
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import AttemptPhase, Backend, BackendContext
from finetune_operator.testing.service_suite import Fate, ServiceHarness, ServiceSuite
from finetune_operator.testing.suite import OTHER_UID, Submitted, request_of, started, submitted
from finetune_trainer.config import FailureClass
from remote_backend.backend import POLL_SECONDS, SILENCE_SECONDS, RemoteBackend
from remote_backend.service import JOB_UID, RunState

JOB = """
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: tiny, namespace: default}
spec:
  model: {source: "hf://a/b"}
  dataset: {source: "hf://a/c", format: chat}
  method: {type: lora}
  training: {globalBatchSize: 4, maxSteps: 10, learningRate: 1e-4}
  topology: {gpusPerNode: 0}
  backend: {type: remote}
"""
READS = ("list", "get")


class RemoteHarness(ServiceHarness):
    job = FineTuneJob.model_validate(yaml.safe_load(JOB))
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
        jumping_clock.run(test)

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
    """Every test of the suite, with the fixture above."""


def test_a_run_that_is_newer_than_the_list_is_not_reported_as_gone(
    harness: RemoteHarness,
) -> None:
    rng = random.Random(0)
    harness.service.latency = lambda: rng.uniform(0.0, 2.0)

    async def work() -> None:
        async with started(harness) as (backend, lent):
            for number in range(20):
                handle = await backend.submit(request_of(harness, backend, number=number))
                attempt = Submitted(harness, backend, lent, handle)
                end = asyncio.get_running_loop().time() + POLL_SECONDS
                while asyncio.get_running_loop().time() < end:
                    assert not (await attempt.observe()).all_gone
                    await asyncio.sleep(0.1)

    jumping_clock.run(work())


@pytest.mark.parametrize(
    ("state", "error", "failure"),
    [
        (RunState.FAILED, "ServiceError", FailureClass.SERVICE_FAILED),
        (RunState.FAILED, "Preempted", FailureClass.PREEMPTED),
        (RunState.FAILED, "UserError", FailureClass.UNKNOWN),
        (RunState.CANCELED, "", FailureClass.DO_NOT_RESTART),
    ],
)
def test_a_failed_run_has_the_failure_class_of_its_error(
    harness: RemoteHarness, state: RunState, error: str, failure: FailureClass
) -> None:
    async def work() -> None:
        async with submitted(harness) as attempt:
            harness.service.end(attempt.handle.name, state, error)
            seen = await attempt.gone()
            assert (seen.phase, seen.failure_class) == (AttemptPhase.FAILED, failure)

    jumping_clock.run(work())


def test_a_silent_service_wakes_its_jobs_once_and_is_reported(
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

    jumping_clock.run(work())

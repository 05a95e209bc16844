"""The shipped fake keeps the contract, and its script says what is seen when."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from finetune_operator.backends.base import Attempt, Backend
from finetune_operator.errors import TransientError
from finetune_operator.testing.suite import BackendSuite, Harness
from support.api.builders import job, planned, ref_to
from support.kernel.fake_backend import PREEMPTED, RUNNING, FakeBackend, ended
from support.reconcile.decisions import START


class FakeHarness(Harness):
    """A restart of the caller leaves what was submitted; so the same backend is given out."""

    job = job()

    def __init__(self) -> None:
        self._backend = FakeBackend()

    @asynccontextmanager
    async def process(self) -> AsyncIterator[Backend]:
        yield self._backend

    async def state(self) -> Any:
        return {name: (run.request, tuple(run.cancels)) for name, run in self._backend.runs.items()}


class TestFakeBackend(BackendSuite):
    @pytest.fixture
    def harness(self) -> FakeHarness:
        return FakeHarness()


def test_script_is_followed_line_by_line_and_its_last_line_stays() -> None:
    backend = FakeBackend(scripts={1: [RUNNING, ended()]})

    async def look() -> list[object]:
        handle = await backend.submit(backend.render(planned(), Attempt(1)))
        return [await backend.observe(ref_to(handle)) for _ in range(3)]

    assert asyncio.run(look()) == [RUNNING, ended(), ended()]


def test_a_planted_error_is_raised_once_and_has_no_effect() -> None:
    backend = FakeBackend()
    backend.errors["submit"] = [TransientError("busy")]
    request = backend.render(planned(), Attempt(1))
    with pytest.raises(TransientError):
        asyncio.run(backend.submit(request))
    assert backend.alive == []
    asyncio.run(backend.submit(request))
    assert [run.request for run in backend.alive] == [request]


def test_a_cancelled_attempt_is_preempted_by_default() -> None:
    backend = FakeBackend()

    async def cancel() -> object:
        handle = await backend.submit(backend.render(planned(), Attempt(1)))
        await backend.cancel(ref_to(handle), START)
        return await backend.observe(ref_to(handle))

    assert asyncio.run(cancel()) == PREEMPTED
    assert backend.run(1).cancels == [START]

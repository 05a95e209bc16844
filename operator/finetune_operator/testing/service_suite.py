"""Additional tests for a backend whose attempts run behind a service: inherit `ServiceSuite`."""

import asyncio
from abc import abstractmethod
from enum import StrEnum

import pytest

from finetune_operator.backends.base import Attempt, AttemptPhase
from finetune_operator.errors import TransientError
from finetune_operator.kube.api_errors import NotLeadingError
from finetune_operator.testing.suite import (
    BackendSuite,
    Harness,
    Lent,
    job_of,
    on_one_loop,
    request_of,
    started,
    submitted,
)

_SOON_SECONDS = 30.0
"""Time within which a backend must have observed a change of an attempt."""


class Fate(StrEnum):
    """The outcome of a request."""

    ANSWERED = "Answered"
    THROTTLED = "Throttled"  # 429; not executed
    IGNORED = "Ignored"  # not executed, no response
    LOST = "Lost"  # executed, no response
    LATE = "Late"  # executed after the client's timeout, no response


class ServiceHarness(Harness):
    """Gives the suite access to a backend and its service.

    Attributes:
        retry_after: Retry-After of a throttled response, in seconds.
    """

    retry_after: float

    @abstractmethod
    def next_write(self, fate: Fate) -> None:
        """Set the fate of the next write request."""

    @abstractmethod
    def num_requests(self) -> int:
        """Return the number of requests that have reached the service."""

    @abstractmethod
    def num_writes(self) -> int:
        """Return the number of write requests that have reached the service."""

    @abstractmethod
    def let_run(self) -> None:
        """Start the queued attempt."""

    @abstractmethod
    def requeue(self) -> None:
        """Put the running attempt back into the queue."""


class ServiceSuite(BackendSuite):
    """The suite; the inheriting test module or class provides the fixture `harness`."""

    @on_one_loop
    async def test_a_throttled_submit_says_when_to_come_again(
        self, harness: ServiceHarness
    ) -> None:
        async with started(harness) as (backend, _):
            before, request = await harness.state(), request_of(harness, backend)
            harness.next_write(Fate.THROTTLED)
            with pytest.raises(TransientError) as throttled:
                await backend.submit(request)
            assert throttled.value.retry_after == harness.retry_after
            assert await harness.state() == before
            assert await backend.submit(request)

    @on_one_loop
    async def test_a_throttled_cancel_is_asked_for_again(self, harness: ServiceHarness) -> None:
        async with submitted(harness) as attempt:
            harness.next_write(Fate.THROTTLED)
            with pytest.raises(TransientError):
                await attempt.cancel()
            await attempt.end()

    @on_one_loop
    async def test_a_submit_whose_answer_is_lost_is_adopted(self, harness: ServiceHarness) -> None:
        async with started(harness) as (backend, _):
            request = request_of(harness, backend)
            harness.next_write(Fate.LOST)
            with pytest.raises(TransientError):
                await backend.submit(request)
            state = await harness.state()
            handle = await backend.submit(request)
            assert await harness.state() == state
            found = await backend.find(job_of(harness), Attempt(1))
            assert found is not None
            assert found.handle == handle

    @on_one_loop
    async def test_a_submit_that_takes_effect_late_makes_nothing_twice(
        self, harness: ServiceHarness
    ) -> None:
        async with started(harness) as (backend, _):
            request = request_of(harness, backend)
            harness.next_write(Fate.LATE)
            with pytest.raises(TransientError):
                await backend.submit(request)
            handle, state = await backend.submit(request), await harness.state()
            await asyncio.sleep(backend.limits.late_submit)
            assert await harness.state() == state
            assert await backend.submit(request) == handle

    @on_one_loop
    async def test_a_submit_that_takes_effect_late_is_found_within_the_backends_bound(
        self, harness: ServiceHarness
    ) -> None:
        async with started(harness) as (backend, _):
            harness.next_write(Fate.LATE)
            with pytest.raises(TransientError):
                await backend.submit(request_of(harness, backend))
            assert await backend.find(job_of(harness), Attempt(1)) is None
            await asyncio.sleep(backend.limits.late_submit)
            assert await backend.find(job_of(harness), Attempt(1)) is not None

    @on_one_loop
    async def test_a_cancel_whose_answer_is_lost_may_be_asked_for_again(
        self, harness: ServiceHarness
    ) -> None:
        async with submitted(harness) as attempt:
            harness.next_write(Fate.LOST)
            with pytest.raises(TransientError):
                await attempt.cancel()
            await attempt.end()

    @on_one_loop
    async def test_a_cancel_that_was_accepted_is_not_asked_for_again(
        self, harness: ServiceHarness
    ) -> None:
        async with submitted(harness) as attempt:
            assert await attempt.cancel(60.0)
            before = harness.num_writes()
            for _ in range(10):
                assert await attempt.cancel(120.0)
            assert harness.num_writes() == before
            await attempt.end()

    @on_one_loop
    async def test_an_attempt_that_is_requeued_waits_again_and_its_job_is_woken(
        self, harness: ServiceHarness
    ) -> None:
        async with submitted(harness) as attempt:
            for happen, phase in (
                (harness.let_run, AttemptPhase.RUNNING),
                (harness.requeue, AttemptPhase.PENDING),
            ):
                attempt.lent.woken.clear()
                happen()
                await asyncio.sleep(_SOON_SECONDS)
                seen = await attempt.backend.observe(attempt.ref)
                assert (seen.phase, seen.all_gone) == (phase, False)
                assert attempt.lent.woken == [attempt.ref.job]

    @on_one_loop
    async def test_who_leads_no_more_writes_nothing(self, harness: ServiceHarness) -> None:
        async with submitted(harness) as attempt:
            attempt.lent.may_write = False
            before = await harness.state()
            with pytest.raises(NotLeadingError):
                await attempt.backend.submit(request_of(harness, attempt.backend, number=2))
            with pytest.raises(NotLeadingError):
                await attempt.cancel()
            assert await harness.state() == before

    @on_one_loop
    async def test_nothing_is_asked_after_close_also_by_a_verb_that_is_under_way(
        self, harness: ServiceHarness
    ) -> None:
        async with harness.process() as backend:
            before = await harness.state()
            await backend.start(Lent())
            busy = asyncio.create_task(backend.submit(request_of(harness, backend)))
            await asyncio.sleep(0)  # `submit` has sent its first request
            await backend.close()
            asked = harness.num_requests()
            with pytest.raises(TransientError):
                await busy
            await asyncio.sleep(_SOON_SECONDS)
            assert harness.num_requests() == asked
        assert await harness.state() == before

    @on_one_loop
    async def test_a_submit_costs_two_requests_and_observing_none(
        self, harness: ServiceHarness
    ) -> None:
        async with started(harness) as (backend, _):
            request = request_of(harness, backend)
            await asyncio.sleep(_SOON_SECONDS)
            before = harness.num_requests()
            await backend.submit(request)
            assert harness.num_requests() - before <= 2
        async with submitted(harness) as attempt:
            await attempt.observe()
            before = harness.num_requests()
            for _ in range(100):
                await attempt.backend.observe(attempt.ref)
            assert harness.num_requests() == before

"""Tests of the contract of backends: inherit `BackendSuite`, provide a `harness`, run pytest.

Each test runs on one event loop, like the operator, so a backend may hold a client that is bound to
the loop. `service_suite` has more tests, for a backend whose attempts run behind a service.
"""

import asyncio
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import (
    Attempt,
    AttemptPhase,
    AttemptRef,
    Backend,
    Handle,
    Observation,
    Request,
    Services,
)
from finetune_operator.errors import AlreadyOwnedError, NoSuchRankError, TransientError
from finetune_operator.kube.api_errors import NotLeadingError
from finetune_operator.kube.cache import Key
from finetune_operator.planner.plan import make_plan

T = TypeVar("T")

UID = "uid-1"
OTHER_UID = "uid-of-another-job"
END_SECONDS = 60.0
"""Time within which a cancelled attempt must end."""

_AGAIN_SECONDS = 0.05


class Harness(ABC):
    """Gives the suite access to a backend.

    Attributes:
        job: A job that the backend can run, with attempts that run until they are cancelled.
    """

    job: FineTuneJob

    @abstractmethod
    def process(self) -> AbstractAsyncContextManager[Backend]:
        """Return the backend of a new operator process; lasting state belongs to the harness."""

    @abstractmethod
    async def state(self) -> Any:
        """Return all objects that the backend has created, in a comparable form."""

    async def occupy(self, backend: Backend) -> None:
        """Create an object of the job `OTHER_UID` under the name of attempt 1 of `job`."""
        handle = await backend.submit(request_of(self, backend, OTHER_UID))
        await Submitted(self, backend, Lent(), handle, OTHER_UID).end()

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test on one event loop."""
        asyncio.run(test)


class Lent(Services):
    """The services of the operator, recorded for a test.

    Attributes:
        woken: Jobs that the backend has woken, in order.
        may_write: Whether this process leads.
    """

    def __init__(self) -> None:
        self.woken: list[Key] = []
        self.may_write = True

    def wake(self, job: Key) -> None:
        """Record the job."""
        self.woken.append(job)

    def check_may_write(self) -> None:
        """Raise NotLeadingError unless this process leads."""
        if not self.may_write:
            raise NotLeadingError("this process no longer leads")

    async def run_blocking(self, call: Callable[[], T], seconds: float) -> T:
        """Run a call in a thread."""
        async with asyncio.timeout(seconds):
            return await asyncio.to_thread(call)


def on_one_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test by the harness."""

    @wraps(test)
    def run(self: Any, harness: Harness, **fixtures: Any) -> None:
        harness.run(test(self, harness, **fixtures))

    return run


@dataclass(frozen=True)
class Submitted:
    """Attempt 1 of a job in one operator process.

    Attributes:
        harness: Harness of the job.
        backend: Backend of the process.
        lent: Services of the backend.
        handle: Result of `submit`.
        uid: Uid of the job.
    """

    harness: Harness
    backend: Backend
    lent: Lent
    handle: Handle
    uid: str = UID

    @property
    def ref(self) -> AttemptRef:
        """The argument of the verbs."""
        job = self.harness.job
        key = Key(job.metadata.namespace, job.metadata.name)
        return AttemptRef(key, self.uid, 1, self.handle, job.spec)

    async def observe(self) -> Observation:
        """Observe the attempt."""
        return await observed(self.backend, self.ref)

    async def cancel(self, grace_seconds: float = 0.0) -> bool:
        """Cancel the attempt."""
        until = datetime.now(UTC) + timedelta(seconds=grace_seconds)
        return await self.backend.cancel(self.ref, until)

    async def end(self) -> Observation:
        """Cancel the attempt without grace, and return the observation after its end."""
        await self.observe()
        assert await self.cancel(), "the backend did not accept the cancel"
        return await self.gone()

    async def gone(self) -> Observation:
        """Observe the attempt until all its processes have ended."""
        return await gone(self.backend, self.ref)


async def observed(backend: Backend, ref: AttemptRef) -> Observation:
    """Observe an attempt, with retries: a new process may not have its state yet."""
    async with asyncio.timeout(END_SECONDS):
        while True:
            try:
                return await backend.observe(ref)
            except TransientError:
                await asyncio.sleep(_AGAIN_SECONDS)


async def gone(backend: Backend, ref: AttemptRef) -> Observation:
    """Observe an attempt until all its processes have ended."""
    async with asyncio.timeout(END_SECONDS):
        while not (seen := await observed(backend, ref)).all_gone:
            await asyncio.sleep(_AGAIN_SECONDS)
    return seen


def job_of(harness: Harness, uid: str = UID) -> FineTuneJob:
    """Return the harness's job with a uid."""
    metadata = harness.job.metadata.model_copy(update={"uid": uid})
    return harness.job.model_copy(update={"metadata": metadata})


def request_of(harness: Harness, backend: Backend, uid: str = UID, number: int = 1) -> Request:
    """Return the rendered request for an attempt of the job with a uid."""
    return backend.render(make_plan(job_of(harness, uid)), Attempt(number))


@asynccontextmanager
async def started(harness: Harness) -> AsyncIterator[tuple[Backend, Lent]]:
    """Start the backend of a new process, and close it at the end."""
    lent = Lent()
    async with harness.process() as backend:
        await backend.start(lent)
        try:
            yield backend, lent
        finally:
            await backend.close()


@asynccontextmanager
async def submitted(harness: Harness) -> AsyncIterator[Submitted]:
    """Submit attempt 1 in a new process."""
    async with started(harness) as (backend, lent):
        handle = await backend.submit(request_of(harness, backend))
        attempt = Submitted(harness, backend, lent, handle)
        await attempt.observe()
        yield attempt


class BackendSuite:
    """The suite; the inheriting test module or class provides the fixture `harness`."""

    @on_one_loop
    async def test_render_gives_the_same_request_twice_and_makes_nothing(
        self, harness: Harness
    ) -> None:
        before = await harness.state()
        async with harness.process() as first, harness.process() as second:
            assert request_of(harness, first) == request_of(harness, second)
        assert await harness.state() == before

    @on_one_loop
    async def test_the_folders_of_a_job_are_named_by_its_fields_and_asking_changes_nothing(
        self, harness: Harness
    ) -> None:
        before, job = await harness.state(), job_of(harness)
        async with harness.process() as first, harness.process() as second:
            folders = first.writes(job)
            assert folders == second.writes(job)
        assert await harness.state() == before
        spec = job.to_object()
        for one in folders:
            block, field = one.field.removeprefix("spec.").rsplit(".", 1)
            assert one.place
            if block in ("checkpoint", "output"):
                assert spec["spec"][block][field] == one.uri

    @on_one_loop
    async def test_requests_of_two_attempts_have_two_names(self, harness: Harness) -> None:
        async with harness.process() as backend:
            names = {request_of(harness, backend, number=number).name for number in (1, 2)}
        assert len(names) == 2

    @on_one_loop
    async def test_submitting_twice_adopts_also_after_a_restart(self, harness: Harness) -> None:
        async with submitted(harness) as first:
            assert await first.backend.submit(request_of(harness, first.backend)) == first.handle
        async with submitted(harness) as again:
            assert again.handle == first.handle
            await again.end()

    @on_one_loop
    async def test_an_attempt_is_found_by_its_own_job_alone_and_after_a_restart(
        self, harness: Harness
    ) -> None:
        async with submitted(harness) as first:
            before = await harness.state()
        async with started(harness) as (backend, lent):
            own, other = job_of(harness), job_of(harness, OTHER_UID)
            assert await _found(backend, own) == first.handle
            assert await _found(backend, own, number=2) is None
            assert await _found(backend, other) is None
            assert await harness.state() == before
            await replace(first, backend=backend, lent=lent).end()
            assert await _found(backend, own) == first.handle

    @on_one_loop
    async def test_an_attempt_that_ended_is_not_started_again(self, harness: Harness) -> None:
        async with submitted(harness) as first:
            ended = await first.end()
        async with submitted(harness) as again:
            assert again.handle == first.handle
            seen = await again.observe()
        assert (seen.phase, seen.all_gone) == (ended.phase, True)

    @on_one_loop
    async def test_a_foreign_thing_of_the_name_is_refused_and_left_alone(
        self, harness: Harness
    ) -> None:
        async with started(harness) as (backend, _):
            await harness.occupy(backend)
            before = await harness.state()
            with pytest.raises(AlreadyOwnedError, match=OTHER_UID):
                await backend.submit(request_of(harness, backend))
            assert await harness.state() == before

    @on_one_loop
    async def test_observing_takes_no_longer_than_a_look(self, harness: Harness) -> None:
        loop = asyncio.get_running_loop()
        async with submitted(harness) as attempt:
            assert not (await attempt.observe()).all_gone
            start = loop.time()
            await attempt.backend.observe(attempt.ref)
            assert loop.time() - start < 1.0
            await attempt.end()

    @on_one_loop
    async def test_an_unknown_handle_is_unknown_and_can_be_cancelled(
        self, harness: Harness
    ) -> None:
        async with submitted(harness) as attempt:
            stranger = replace(attempt, handle=replace(attempt.handle, uid="uid-9-1"))
            assert (await stranger.observe()).phase is AttemptPhase.UNKNOWN
            await stranger.cancel()
            assert list(await stranger.backend.collect(stranger.ref)) == []
            assert not (await attempt.observe()).all_gone
            await attempt.end()

    @on_one_loop
    async def test_cancel_may_be_called_again_and_ends_the_attempt(self, harness: Harness) -> None:
        async with submitted(harness) as attempt:
            for grace in (5.0, 5.0, 0.0):
                await attempt.cancel(grace)
            assert (await attempt.gone()).phase is AttemptPhase.FAILED
            await attempt.cancel()
            assert (await attempt.observe()).phase is AttemptPhase.FAILED

    @on_one_loop
    async def test_the_log_of_a_rank_that_does_not_exist_is_a_sentence(
        self, harness: Harness
    ) -> None:
        async with submitted(harness) as attempt:
            with pytest.raises(NoSuchRankError, match=r"rank 99 does not exist; .* has "):
                async for _ in attempt.backend.logs(attempt.ref, 99):
                    pass
            await attempt.end()

    @on_one_loop
    async def test_nothing_is_collected_before_it_exists(self, harness: Harness) -> None:
        async with submitted(harness) as attempt:
            assert list(await attempt.backend.collect(attempt.ref)) == []
            await attempt.end()

    @on_one_loop
    async def test_validate_opens_no_file(self, harness: Harness, tmp_path: Path) -> None:
        source = harness.job.spec.model.model_copy(update={"source": f"file://{tmp_path}/nowhere"})
        spec = harness.job.spec.model_copy(update={"model": source})
        opened: list[str] = []
        async with harness.process() as backend:
            job = harness.job.model_copy(update={"spec": spec})
            _validate_and_record_files(backend, job, opened)
        assert opened == []


async def _found(backend: Backend, job: FineTuneJob, number: int = 1) -> Handle | None:
    found = await backend.find(job, Attempt(number))
    return found.handle if found else None


def _validate_and_record_files(backend: Backend, job: FineTuneJob, opened: list[str]) -> None:
    """Call `validate` while an audit hook of the interpreter records each opened file."""

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if is_listening and event in ("open", "os.listdir", "os.scandir"):
            opened.append(os.fspath(arguments[0]) if arguments else "")

    is_listening = True
    sys.addaudithook(record)
    try:
        backend.validate(job)
    finally:
        is_listening = False

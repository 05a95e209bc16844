"""The HTTP client against the fake service on a real socket."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fake_service import RemoteService, served
from finetune_operator.backends.base import BackendContext
from finetune_operator.errors import BackendError
from finetune_operator.testing.service_suite import Fate
from finetune_operator.testing.suite import Lent
from remote_backend.http_backend import HttpBackend, HttpServiceClient
from remote_backend.service import JOB_UID, RunState, ServiceError

TAGS = {JOB_UID: "uid-1"}

Test = Callable[[RemoteService, HttpServiceClient], Awaitable[None]]


def with_client(test: Test) -> None:
    async def work() -> None:
        service = RemoteService()
        async with served(service) as url:
            client = HttpServiceClient(url)
            await client.open()
            try:
                await test(service, client)
            finally:
                await client.close()

    asyncio.run(work())


def test_a_created_run_is_returned_by_get_and_list_and_can_be_cancelled() -> None:
    async def test(service: RemoteService, client: HttpServiceClient) -> None:
        run = await client.create("run 1/a", TAGS)
        assert run == await client.get("run 1/a")
        assert await client.list_runs() == {"run 1/a": run}
        until = datetime(2026, 1, 1, tzinfo=UTC)
        cancelled = await client.cancel("run 1/a", until)
        assert cancelled is not None
        assert (cancelled.state, cancelled.cancel_until) == (RunState.CANCELLING, until)

    with_client(test)


def test_a_run_that_does_not_exist_is_none() -> None:
    async def test(service: RemoteService, client: HttpServiceClient) -> None:
        assert await client.get("run-1") is None
        assert await client.cancel("run-1", datetime.now(UTC)) is None

    with_client(test)


def test_an_error_response_has_its_status_message_and_retry_after() -> None:
    async def test(service: RemoteService, client: HttpServiceClient) -> None:
        await client.create("run-1", TAGS)
        with pytest.raises(ServiceError, match="run run-1 already exists") as conflict:
            await client.create("run-1", TAGS)
        assert (conflict.value.status, conflict.value.retry_after) == (409, None)
        service.fate = lambda verb, name: Fate.THROTTLED
        with pytest.raises(ServiceError, match="too many requests") as throttled:
            await client.list_runs()
        assert (throttled.value.status, throttled.value.retry_after) == (429, 5.0)

    with_client(test)


def test_a_service_that_cannot_be_reached_is_a_service_error() -> None:
    async def work() -> None:
        client = HttpServiceClient("http://127.0.0.1:9")
        await client.open()
        try:
            with pytest.raises(ServiceError, match="cannot be reached"):
                await client.list_runs()
        finally:
            await client.close()

    asyncio.run(work())


def test_starting_without_a_url_names_the_variable() -> None:
    async def work() -> None:
        with pytest.raises(BackendError, match="REMOTE_SERVICE_URL is not set"):
            await HttpBackend(BackendContext(Path())).start(Lent())

    asyncio.run(work())

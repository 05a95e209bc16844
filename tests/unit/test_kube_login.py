"""A token that cannot be had for a while: no answer, and no end of the process."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from kubernetes.aio.client import Configuration

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.informer import Informer
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.config import ClusterAccess
from finetune_operator.kube.errors import UnauthorizedError
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import CONFIG_MAPS
from finetune_operator.kube.watch import Watch


def by_file(token: Path, on_read: Callable[[], None]) -> HttpClient:
    """Return a client that reads its token before each request, as a service account's does."""

    def read(configuration: Configuration) -> None:
        on_read()
        configuration.api_key["BearerToken"] = f"Bearer {token.read_text()}"

    configuration = Configuration(host="http://127.0.0.1:9")  # nobody is asked
    configuration.refresh_api_key_hook = read
    return HttpClient(ClusterAccess(configuration))


def test_a_token_that_cannot_be_read_is_told_and_ends_no_watch(tmp_path: Path) -> None:
    async def work() -> None:
        tries = asyncio.Semaphore(0)
        async with by_file(tmp_path / "token", tries.release) as client:
            with pytest.raises(UnauthorizedError, match=r"there is no token now .*No such file"):
                await client.get(CONFIG_MAPS, "one", "ns")
            with pytest.raises(UnauthorizedError, match="there is no token now"):
                await anext(client.watch(CONFIG_MAPS, resource_version="1"))
            informer = Informer(
                client,
                Watch(CONFIG_MAPS),
                ObjectCache(CONFIG_MAPS),
                wake=lambda job: None,
                on_missed_events=lambda: None,
                namespace=None,
                backoff=Backoff(0.01, 0.01),
            )
            task = asyncio.create_task(informer.run())
            async with asyncio.timeout(20):
                for _ in range(5):  # two by the requests above
                    await tries.acquire()
            assert not task.done()
            assert not informer.is_synced.is_set()
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(work())

"""A token that cannot be had for a while: no answer, and no end of the process."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.informer import Informer
from finetune_operator.kube.api_errors import UnauthorizedError
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.config import ClusterAccess
from finetune_operator.kube.credentials import TokenFile
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.login import Login
from finetune_operator.kube.resources import CONFIG_MAPS
from finetune_operator.kube.watch import Watch


class CountedFile(TokenFile):
    """A token file that is never there; tells of each try to read it."""

    def __init__(self, file: Path, on_read: Callable[[], None]) -> None:
        super().__init__(file)
        self._on_read = on_read

    async def renew(self) -> None:
        self._on_read()
        await super().renew()


def by_file(token: Path, on_read: Callable[[], None]) -> HttpClient:
    """Return a client that reads its token before each request, as a service account's does."""
    login = Login("http://127.0.0.1:9", CountedFile(token, on_read))  # nobody is asked
    return HttpClient(ClusterAccess(login))


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

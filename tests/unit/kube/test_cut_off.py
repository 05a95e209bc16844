"""A watch whose connection ends in the middle of an event, as behind a proxy that is restarted."""

import asyncio
import json
from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

import pytest

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.informer import Informer
from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.config import ClusterAccess
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.labels import JOB_LABEL, JOB_UID_LABEL
from finetune_operator.kube.login import Login
from finetune_operator.kube.resources import CONFIG_MAPS, Object
from finetune_operator.kube.watch import Watch

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


def config_map(name: str, version: int) -> Object:
    labels = {JOB_UID_LABEL: "uid", JOB_LABEL: "tiny"}
    metadata = {"name": name, "namespace": "ns", "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


def line(made: Object) -> bytes:
    return json.dumps({"type": "ADDED", "object": made}).encode() + b"\n"


class CuttingServer:
    """Answers lists with nothing, and one watch after the other with what it is given.

    Attributes:
        asked: From which resourceVersion on each watch was asked for.
    """

    def __init__(self, watches: Sequence[bytes]) -> None:
        self.asked: list[str] = []
        self._watches = list(watches)

    async def __aenter__(self) -> KubeClient:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        login = Login(f"http://127.0.0.1:{port}")
        self._client = HttpClient(ClusterAccess(login))
        return await self._client.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        query = parse_qs(urlsplit(head.split()[1].decode()).query)
        if "watch" in query:
            self.asked += query["resourceVersion"]
            body = self._watches.pop(0) if self._watches else b""
        else:
            body = json.dumps({"metadata": {"resourceVersion": "5"}, "items": []}).encode()
        writer.write(HEAD + body)
        await writer.drain()
        writer.close()


@pytest.mark.parametrize("end", [b'{"type": "ADDED", "obj', b"Bad Gateway", b"[]"])
def test_an_event_that_is_cut_off_is_an_answer_that_did_not_come(end: bytes) -> None:
    async def work() -> list[str]:
        seen = []
        async with CuttingServer([line(config_map("whole", 6)) + end]) as client:
            watch = client.watch(CONFIG_MAPS, resource_version="5")
            seen.append((await anext(watch)).object["metadata"]["name"])
            with pytest.raises(UnavailableError, match="no response to watch /api/v1/configmaps"):
                await anext(watch)
        return seen

    assert asyncio.run(work()) == ["whole"]


def test_a_watch_that_was_cut_off_goes_on_after_the_last_whole_event() -> None:
    server = CuttingServer(
        [line(config_map("first", 6)) + line(config_map("lost", 7))[:40], line(config_map("b", 8))]
    )

    async def work() -> set[str]:
        cache = ObjectCache(CONFIG_MAPS)
        async with server as client, asyncio.timeout(20):
            informer = Informer(
                client,
                Watch(CONFIG_MAPS),
                cache,
                wake=lambda job: None,
                on_missed_events=lambda: None,
                namespace=None,
                backoff=Backoff(0.01, 0.01),
            )
            task = asyncio.create_task(informer.run())
            while len(cache) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return {one["metadata"]["name"] for one in cache}

    assert asyncio.run(work()) == {"first", "b"}
    assert server.asked[:2] == ["5", "6"]

"""How many requests a client has under way at once, and what does not wait for them."""

import asyncio
import json
from types import TracebackType

from finetune_operator.kube.client import ClientOptions, KubeClient
from finetune_operator.kube.config import ClusterAccess
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.login import Login
from finetune_operator.kube.resources import CONFIG_MAPS, PODS, Object

LIMIT = 4
ASKED = 20
HELD_SECONDS = 0.02
EVENT = {"type": "ADDED", "object": {"metadata": {"name": "seen", "resourceVersion": "6"}}}


class HoldingServer:
    """Holds every request for a moment, or until it is told; streams get one line at once.

    Attributes:
        most: The most requests that were under way at once, streams apart.
        connections: Connections so far.
        let_go: Set, requests are held for a moment only.
    """

    def __init__(self) -> None:
        self.most = self.connections = self._under_way = 0
        self.let_go = asyncio.Event()

    async def __aenter__(self) -> KubeClient:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        access = ClusterAccess(Login(f"http://127.0.0.1:{port}"))
        self._client = HttpClient(access, ClientOptions(connections=LIMIT))
        return await self._client.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.let_go.set()
        await self._client.__aexit__(kind, error, traceback)
        self._server.close()
        await self._server.wait_closed()

    async def is_full(self) -> None:
        """Return when as many requests are held as the client may send."""
        while self._under_way < LIMIT:
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while (head := await self._head(reader)) is not None:
            if b"watch=true" in head or b"/log?" in head:
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                writer.write(json.dumps(EVENT).encode() + b"\n")
                await writer.drain()
                break
            await self._hold()
            body = json.dumps({"metadata": {"name": "x"}}).encode()
            size = f"Content-Length: {len(body)}\r\n\r\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + size + body)
            await writer.drain()
        writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes | None:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None

    async def _hold(self) -> None:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        await self.let_go.wait()
        await asyncio.sleep(HELD_SECONDS)
        self._under_way -= 1


async def ask(client: KubeClient) -> list[Object]:
    names = (f"number-{number}" for number in range(ASKED))
    return await asyncio.gather(*(client.get(CONFIG_MAPS, name, "ns") for name in names))


def test_no_more_requests_are_under_way_than_the_limit_and_all_are_answered() -> None:
    async def work() -> tuple[int, int, int]:
        server = HoldingServer()
        server.let_go.set()
        async with server as client, asyncio.timeout(60):
            answers = await ask(client)
        return len(answers), server.most, server.connections

    assert asyncio.run(work()) == (ASKED, LIMIT, LIMIT)


def test_streams_do_not_wait_for_requests_that_are_under_way() -> None:
    async def work() -> list[object]:
        server = HoldingServer()
        async with server as client, asyncio.timeout(60):
            asking = asyncio.create_task(ask(client))
            await server.is_full()
            event = await anext(client.watch(PODS, "ns", resource_version="5"))
            line = await anext(client.log("x", "ns", tail=1))
            assert not asking.done()
            server.let_go.set()
            await asking
        return [event.object, json.loads(line)]

    assert asyncio.run(work()) == [EVENT["object"], EVENT]

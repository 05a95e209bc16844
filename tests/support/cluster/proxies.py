"""Proxies between a client and the API server that see what passes."""

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web

from finetune_operator.kube.config import ClusterAccess, load_access
from support.kernel.loop_thread import loop_thread

Done = Callable[[str, str, bytes], None]
_HOP = frozenset({"host", "content-length", "transfer-encoding", "connection"})


class Proxy(ABC):
    """Passes requests on; a context manager.

    Args:
        kubeconfig: Of the cluster behind the proxy.
        folder: Where the kubeconfig that leads through it is written.

    Attributes:
        kubeconfig: That file.
    """

    def __init__(self, kubeconfig: str | Path, folder: Path) -> None:
        self.kubeconfig = folder / "through-the-proxy.yaml"
        self._behind = Path(kubeconfig)
        self._stack = contextlib.ExitStack()
        self._writes = set[asyncio.Task[web.StreamResponse]]()
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._loop = self._stack.enter_context(loop_thread())
        port = self._loop.run(self._open())
        config = yaml.safe_load(self._behind.read_text())
        (named,) = config["clusters"]
        named["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.write_text(yaml.safe_dump(self._as_asked(config)))
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._close())
        self._stack.close()

    @abstractmethod
    def _as_asked(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the kubeconfig of whoever asks the proxy, made of the cluster's."""

    @abstractmethod
    async def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that a request is passed on with."""

    @abstractmethod
    async def _hear(self, request: web.Request, answer: aiohttp.ClientResponse) -> bytes | None:
        """Hear of an answer; return it whole if it was read, and None if it is to be passed on."""

    async def _open(self) -> int:
        self._access: ClusterAccess = await load_access(str(self._behind))
        connector = aiohttp.TCPConnector(
            limit=0, ssl=self._access.ssl_context(), socket_factory=self._open_socket
        )
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        # A watch whose client is gone must not stay open behind it.
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def _close(self) -> None:
        await self._runner.cleanup()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._session.close()
        # A cancelled request closes its TLS connection when the server answers, after this close.
        async with asyncio.timeout(30):
            while any(one.fileno() >= 0 for one in self._sockets):
                await asyncio.sleep(0.01)

    def _open_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        opened = socket.socket(family, kind, protocol)
        self._sockets.append(opened)
        return opened

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        answering = asyncio.create_task(self._answer(request, body))
        if request.method == "GET":
            return await answering
        # The API server carries a write out though its sender is gone meanwhile: hear of it.
        self._writes.add(answering)
        answering.add_done_callback(self._writes.discard)
        return await asyncio.shield(answering)

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        async with self._session.request(
            request.method,
            self._access.host + request.raw_path,
            headers=await self._headers(_without_hop(request.headers)),
            data=body or None,  # b"" would be sent as of some media type
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            kept = _without_hop(answer.headers)
            if (said := await self._hear(request, answer)) is not None:
                return web.Response(status=answer.status, headers=kept, body=said)
            passed = web.StreamResponse(status=answer.status, headers=kept)
            with contextlib.suppress(ConnectionResetError):  # who asked may have left
                await passed.prepare(request)
                async for chunk in answer.content.iter_any():
                    await passed.write(chunk)
            return passed


class WriteProxy(Proxy):
    """Passes requests on as the cluster's user, sees each write, and may end its sender.

    Args:
        kubeconfig: Of the cluster behind the proxy.
        folder: Where the kubeconfig that leads through it is written.
        done: Called with method, path and the API server's answer after a write has succeeded and
            before it is answered; not for Leases, and not for questions about rights.
    """

    def __init__(self, kubeconfig: str | Path, folder: Path, done: Done) -> None:
        super().__init__(kubeconfig, folder)
        self._done = done

    def _as_asked(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "users": [{**one, "user": {}} for one in config["users"]]}

    async def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        kept = {key: one for key, one in headers.items() if key.lower() != "authorization"}
        return {**kept, **await self._access.headers()}

    async def _hear(self, request: web.Request, answer: aiohttp.ClientResponse) -> bytes | None:
        stored = not any(kind in request.path for kind in ("/leases", "/selfsubject"))
        is_write = request.method != "GET" and stored
        if not is_write or answer.status >= 300:
            return None
        said = await answer.read()
        self._done(request.method, request.path, said)
        return said


@dataclass(frozen=True)
class Answer:
    """How the API server answered one request.

    Attributes:
        agent: Who asked, by the name it gives itself.
        path: What it asked for.
    """

    agent: str
    path: str
    status: int


class AnswerProxy(Proxy):
    """Passes requests on with the token they carry, and keeps how each was answered.

    Attributes:
        answers: Every answer so far; of a watch from its beginning.
    """

    def __init__(self, kubeconfig: str | Path, folder: Path) -> None:
        super().__init__(kubeconfig, folder)
        self.answers: list[Answer] = []

    def _as_asked(self, config: dict[str, Any]) -> dict[str, Any]:
        return config

    async def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        return dict(headers)

    async def _hear(self, request: web.Request, answer: aiohttp.ClientResponse) -> bytes | None:
        agent = request.headers.get("User-Agent", "")
        self.answers.append(Answer(agent, request.path, answer.status))
        return None


def _without_hop(headers: Mapping[str, str]) -> dict[str, str]:
    return {key: one for key, one in headers.items() if key.lower() not in _HOP}

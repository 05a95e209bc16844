"""A proxy between a client and the API server that keeps how each request was answered."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp
import yaml
from aiohttp import web

from finetune_operator.kube.config import ClusterAccess, load_access
from loop_thread import loop_thread

_HOP = frozenset({"host", "content-length", "transfer-encoding", "connection"})


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


class AnswerProxy:
    """Passes requests on with the token they carry; a context manager.

    Args:
        kubeconfig: Of the cluster behind the proxy; its user must log in with a token.
        folder: Where the kubeconfig that leads through it is written.

    Attributes:
        kubeconfig: That file.
        answers: Every answer so far; of a watch from its beginning.
    """

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig = folder / "through-the-proxy.yaml"
        self.answers: list[Answer] = []
        self._behind = kubeconfig
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._loop = self._stack.enter_context(loop_thread())
        port = self._loop.run(self._open())
        config = yaml.safe_load(self._behind.read_text())
        (named,) = config["clusters"]
        named["cluster"] = {"server": f"http://127.0.0.1:{port}"}
        self.kubeconfig.write_text(yaml.safe_dump(config))
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._close())
        self._stack.close()

    async def _open(self) -> int:
        self._access: ClusterAccess = await load_access(str(self._behind))
        connector = aiohttp.TCPConnector(limit=0, ssl=self._access.ssl_context())
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
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        async with self._session.request(
            request.method,
            self._access.host + request.raw_path,
            headers={key: one for key, one in request.headers.items() if key.lower() not in _HOP},
            data=await request.read() or None,  # b"" would be sent as of some media type
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            agent = request.headers.get("User-Agent", "")
            self.answers.append(Answer(agent, request.path, answer.status))
            kept = {key: one for key, one in answer.headers.items() if key.lower() not in _HOP}
            passed = web.StreamResponse(status=answer.status, headers=kept)
            with contextlib.suppress(ConnectionResetError):  # who asked may have left
                await passed.prepare(request)
                async for chunk in answer.content.iter_any():
                    await passed.write(chunk)
            return passed

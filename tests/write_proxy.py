"""A proxy between the operator and the API server that sees each write, and may end its sender."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

import aiohttp
import yaml
from aiohttp import web

from finetune_operator.kube.config import ClusterAccess, load_access
from loop_thread import loop_thread

Done = Callable[[str, str, bytes], None]
_HOP = frozenset({"host", "content-length", "transfer-encoding", "connection", "authorization"})


class WriteProxy:
    """Passes requests on as the user of a kubeconfig; a context manager.

    Args:
        kubeconfig: Of the cluster behind the proxy.
        folder: Where the kubeconfig that leads through it is written.
        done: Called with method, path and the API server's answer after a write has succeeded and
            before it is answered; not for Leases.

    Attributes:
        kubeconfig: That file.
    """

    def __init__(self, kubeconfig: str, folder: Path, done: Done) -> None:
        self.kubeconfig = folder / "through-the-proxy.yaml"
        self._behind = kubeconfig
        self._done = done
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._loop = self._stack.enter_context(loop_thread())
        port = self._loop.run(self._open())
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "proxy", "user": {}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._close())
        self._stack.close()

    async def _open(self) -> int:
        self._access: ClusterAccess = await load_access(self._behind)
        connector = aiohttp.TCPConnector(ssl=self._access.ssl_context())
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def _close(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {key: one for key, one in request.headers.items() if key.lower() not in _HOP}
        async with self._session.request(
            request.method,
            self._access.host + request.raw_path,
            headers={**headers, **await self._access.headers()},
            data=await request.read() or None,  # b"" would be sent as of some media type
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            kept = {key: one for key, one in answer.headers.items() if key.lower() not in _HOP}
            is_write = request.method != "GET" and "/leases" not in request.path
            if is_write and answer.status < 300:
                said = await answer.read()
                self._done(request.method, request.path, said)
                return web.Response(status=answer.status, headers=kept, body=said)
            passed = web.StreamResponse(status=answer.status, headers=kept)
            with contextlib.suppress(ConnectionResetError):  # who asked may be dead
                await passed.prepare(request)
                async for chunk in answer.content.iter_any():
                    await passed.write(chunk)
            return passed

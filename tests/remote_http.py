"""The remote twin's service over HTTP: served by a test, and asked by an operator's process.

The operator finds it by a variable of its environment.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, ClassVar
from urllib.parse import quote

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import TypeAdapter

from finetune_operator.backends.base import BackendContext, Limits, Services
from finetune_operator.testing.remote import RemoteBackend
from finetune_operator.testing.remote_service import RemoteRun, RemoteService, ServiceError

ENV_URL = "REMOTE_SERVICE_URL"
HASTY_POLL_SECONDS = 0.25

_RUN = TypeAdapter(RemoteRun)
_RUNS = TypeAdapter(dict[str, RemoteRun])


@asynccontextmanager
async def served(service: RemoteService) -> AsyncIterator[str]:
    """Serve it on loopback, and yield its URL."""

    async def list_runs(request: web.Request) -> web.Response:
        return _json(_RUNS.dump_json(dict(await service.list_runs())))

    async def get(request: web.Request) -> web.Response:
        return _found(await service.get(request.match_info["name"]))

    async def create(request: web.Request) -> web.Response:
        tags = await request.json()
        return _found(await service.create(request.match_info["name"], tags))

    async def cancel(request: web.Request) -> web.Response:
        until = datetime.fromisoformat((await request.json())["until"])
        return _found(await service.cancel(request.match_info["name"], until))

    app = web.Application(middlewares=[_tell_errors], client_max_size=2**24)
    app.add_routes(
        [
            web.get("/runs", list_runs),
            web.get("/runs/{name}", get),
            web.put("/runs/{name}", create),
            web.post("/runs/{name}/cancel", cancel),
        ]
    )
    # A request that nobody waits for any more is carried out nevertheless; its handler is not kept.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@web.middleware
async def _tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ServiceError as error:
        wait = {} if error.retry_after is None else {"Retry-After": f"{error.retry_after:g}"}
        return web.json_response({"message": str(error)}, status=error.status, headers=wait)


def _found(run: RemoteRun | None) -> web.Response:
    if run is None:
        raise ServiceError(404, "there is no run of that name")
    return _json(_RUN.dump_json(run))


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


class HttpServiceClient:
    """The four requests over HTTP, between `open` and `close`.

    Args:
        url: Of the service.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Have a pool of connections, without a time limit of its own."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def list_runs(self) -> Mapping[str, RemoteRun]:
        """Return all runs by name."""
        return _RUNS.validate_json(await self._send("GET", "/runs"))

    async def get(self, name: str) -> RemoteRun | None:
        """Return a run, or None."""
        return await self._find("GET", f"/runs/{quote(name)}")

    async def create(self, name: str, tags: Mapping[str, str]) -> RemoteRun:
        """Create a run."""
        return _RUN.validate_json(await self._send("PUT", f"/runs/{quote(name)}", dict(tags)))

    async def cancel(self, name: str, until: datetime) -> RemoteRun | None:
        """Ask to stop a run."""
        path = f"/runs/{quote(name)}/cancel"
        return await self._find("POST", path, {"until": until.isoformat()})

    async def _find(self, method: str, path: str, body: Any = None) -> RemoteRun | None:
        try:
            return _RUN.validate_json(await self._send(method, path, body))
        except ServiceError as error:
            if error.status != 404:
                raise
            return None

    async def _send(self, method: str, path: str, body: Any = None) -> bytes:
        assert self._session is not None, "the client was not opened"
        try:
            async with self._session.request(method, self._url + path, json=body) as answer:
                said = await answer.read()
        except aiohttp.ClientError as error:
            raise ServiceError(0, f"it cannot be reached ({error!r})") from error
        if answer.status >= 400:
            wait = answer.headers.get("Retry-After")
            message = json.loads(said)["message"]
            raise ServiceError(answer.status, message, float(wait) if wait else None)
        return said


class HttpBackend(RemoteBackend):
    """Backend `remote`, whose service is somewhere else."""

    def __init__(self, context: BackendContext, **seconds: float) -> None:
        self._http = HttpServiceClient(context.environ[ENV_URL])
        super().__init__(context, self._http, **seconds)

    async def start(self, services: Services) -> None:
        """Open the connections, and begin to list."""
        await self._http.open()
        await super().start(services)

    async def close(self) -> None:
        """Close the connections once nothing is asked any more."""
        await super().close()
        await self._http.close()


class HastyBackend(HttpBackend):
    """... that waits less, as its time is real."""

    limits: ClassVar[Limits] = Limits(submit=5.0, late_submit=5.0, unconfirmed_cancel=5.0)

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context, poll_seconds=HASTY_POLL_SECONDS, request_seconds=1.0)


class PatientBackend(HttpBackend):
    """... that waits for each answer, so that what is asked can be counted."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context, poll_seconds=HASTY_POLL_SECONDS, request_seconds=60.0)

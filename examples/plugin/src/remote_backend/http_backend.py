"""The backend that the package registers: `RemoteBackend` with an HTTP client.

The operator's environment variable REMOTE_SERVICE_URL holds the URL of the service.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

import aiohttp
from pydantic import TypeAdapter

from finetune_operator.backends.base import BackendContext, Services
from finetune_operator.errors import BackendError
from remote_backend.backend import RemoteBackend
from remote_backend.service import RemoteRun, ServiceError

ENV_URL = "REMOTE_SERVICE_URL"

_RUN = TypeAdapter(RemoteRun)
_RUNS = TypeAdapter(dict[str, RemoteRun])


class HttpServiceClient:
    """Sends the four requests over HTTP, between `open` and `close`.

    Args:
        url: URL of the service.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Create the connection pool; `RemoteBackend` limits the number and time of requests."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def list_runs(self) -> Mapping[str, RemoteRun]:
        """Return all runs by name."""
        return _RUNS.validate_json(await self._send("GET", "/runs"))

    async def get(self, name: str) -> RemoteRun | None:
        """Return a run; None if it does not exist."""
        return await self._find("GET", f"/runs/{quote(name, safe='')}")

    async def create(self, name: str, tags: Mapping[str, str]) -> RemoteRun:
        """Create a run."""
        return _RUN.validate_json(
            await self._send("PUT", f"/runs/{quote(name, safe='')}", dict(tags))
        )

    async def cancel(self, name: str, until: datetime) -> RemoteRun | None:
        """Request that a run stops."""
        path = f"/runs/{quote(name, safe='')}/cancel"
        return await self._find("POST", path, {"until": until.isoformat()})

    async def _find(self, method: str, path: str, body: Any = None) -> RemoteRun | None:
        try:
            return _RUN.validate_json(await self._send(method, path, body))
        except ServiceError as error:
            if error.status != 404:
                raise
            return None

    async def _send(self, method: str, path: str, body: Any = None) -> bytes:
        assert self._session is not None, "the client is not open"
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise ServiceError(0, f"cannot be reached ({error!r})") from error
        if response.status >= 400:
            wait = response.headers.get("Retry-After")
            message = content.decode(errors="replace")
            raise ServiceError(response.status, message, float(wait) if wait else None)
        return content


class HttpBackend(RemoteBackend):
    """Backend `remote` over HTTP."""

    def __init__(self, context: BackendContext, **seconds: float) -> None:
        self._url = context.environ.get(ENV_URL, "")
        self._http = HttpServiceClient(self._url)
        super().__init__(context, self._http, **seconds)

    async def start(self, services: Services) -> None:
        """Open the connections, and start to poll.

        Raises:
            BackendError: the environment does not name the service.
        """
        if not self._url:
            raise BackendError(f"{ENV_URL} is not set; set it to the URL of the service")
        await self._http.open()
        await super().start(services)

    async def close(self) -> None:
        """Stop polling, then close the connections."""
        await super().close()
        await self._http.close()

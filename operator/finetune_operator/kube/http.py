"""Requests to an API server over one pool of connections.

A request is retried only after a 401, once, with a renewed token.
"""

from collections.abc import AsyncIterator
from typing import Self

import aiohttp
import orjson

from finetune_operator.kube.api_errors import NotLeadingError, UnauthorizedError
from finetune_operator.kube.client import Call, ClientOptions, KubeClient, error_in, no_response
from finetune_operator.kube.config import ClusterAccess, load_access
from finetune_operator.kube.resources import Object

_JSON = "application/json"
_MERGE = "application/merge-patch+json"
_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}


class HttpClient(KubeClient):
    """Client of a cluster; an async context manager."""

    def __init__(self, access: ClusterAccess, options: ClientOptions | None = None) -> None:
        super().__init__(options)
        self.access = access
        self._requests: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None

    @classmethod
    async def connect(
        cls, kubeconfig: str | None = None, options: ClientOptions | None = None
    ) -> Self:
        """Return a client of the cluster that `load_access` finds.

        Raises:
            KubeConfigError: no cluster is configured.
        """
        return cls(await load_access(kubeconfig), options)

    async def __aenter__(self) -> Self:
        """Create the pool of connections; no request is sent yet."""
        context, options = self.access.ssl_context(), self.options
        agent = {"User-Agent": options.user_agent, "Accept": _JSON}

        def session(limit: int) -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(limit=limit, ssl=context, keepalive_timeout=60)
            return aiohttp.ClientSession(connector=connector, headers=agent, auto_decompress=True)

        self._requests, self._streams = session(options.connections), session(0)
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Close every connection; watches end with an error."""
        for session in (self._requests, self._streams):
            if session is not None:
                await session.close()

    async def exchange(self, call: Call) -> Object:
        """Send a request and return the object; retry once if the token had expired."""
        try:
            return await self._exchange(call)
        except UnauthorizedError:
            await self.access.renew()
            return await self._exchange(call)

    async def _exchange(self, call: Call) -> Object:
        assert self._requests is not None, "the client is used outside of its context"
        seconds = self.options.request_seconds
        if call.verb not in ("get", "list"):
            seconds = min(seconds, self._seconds_to_write(call))
        status = 0
        try:
            async with self._requests.request(
                _METHODS[call.verb],
                self.access.host + call.path,
                params=call.query,
                data=call.body,
                headers=await self._headers(_MERGE if call.verb == "patch" else _JSON),
                proxy=self.access.proxy,
                server_hostname=self.access.server_name,
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                status = response.status
                body = await response.read()
                if status < 400:
                    obj: Object = orjson.loads(body)
                    return obj
                raise error_in(status, _status_object(body), response.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            raise no_response(error, call) from error
        finally:
            self.calls.add(call.verb, call.resource.plural, status)

    async def lines(self, call: Call, *, is_patient: bool = False) -> AsyncIterator[bytes]:
        """Yield the lines of a response, including an incomplete last line."""
        assert self._streams is not None, "the client is used outside of its context"
        silence = None if is_patient else self.options.silence_seconds
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.options.request_seconds, sock_read=silence
        )
        status, rest = 0, b""
        try:
            async with self._streams.get(
                self.access.host + call.path,
                params=call.query,
                headers=await self._headers(_JSON),
                proxy=self.access.proxy,
                server_hostname=self.access.server_name,
                timeout=timeout,
            ) as response:
                status = response.status
                if status >= 400:
                    body = _status_object(await response.read())
                    raise error_in(status, body, response.headers.get("Retry-After"))
                # Not by readline(), which refuses lines that are longer than its buffer.
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line
                if rest:
                    yield rest
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            raise no_response(error, call) from error
        except UnauthorizedError:
            await self.access.renew()
            raise
        finally:
            self.calls.add(call.verb, call.resource.plural, status)

    async def _headers(self, content_type: str) -> dict[str, str]:
        return {"Content-Type": content_type, **await self.access.headers()}

    def _seconds_to_write(self, call: Call) -> float:
        """Return the timeout of a write.

        Writes of the Lease are exempt, because a replica writes it before it leads.
        """
        limit = self.options.seconds_to_write
        if limit is None or call.resource.plural == "leases":
            return self.options.request_seconds
        if (left := limit()) <= 0:
            raise NotLeadingError(f"{call} is not sent, because this replica does not lead")
        return left


def _status_object(body: bytes) -> Object:
    """Return the `Status` in a response; the response of a proxy may be plain text instead."""
    try:
        status = orjson.loads(body)
    except orjson.JSONDecodeError:
        status = None
    if isinstance(status, dict):
        return status
    return {"message": body.decode(errors="replace").strip()[:1024]}

"""Requests to an API server over one pool of connections.

A request is retried only after a 401, once, with a renewed token.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, Self

import aiohttp
import orjson

from finetune_operator.kube.api_errors import (
    ApiError,
    LargePageError,
    NotLeadingError,
    UnauthorizedError,
)
from finetune_operator.kube.client import Call, ClientOptions, KubeClient, error_in, no_response
from finetune_operator.kube.config import ClusterAccess, load_access
from finetune_operator.kube.decoding import IN_LIST, decode
from finetune_operator.kube.resources import Object

_JSON = "application/json"
_MERGE = "application/merge-patch+json"
_CLOSE_SECONDS = 1.0
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
        self._websockets: aiohttp.ClientSession | None = None

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

        def session(
            limit: int, *middlewares: aiohttp.ClientMiddlewareType
        ) -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(limit=limit, ssl=context, keepalive_timeout=60)
            return aiohttp.ClientSession(
                connector=connector, headers=agent, auto_decompress=True, middlewares=middlewares
            )

        self._requests, self._streams = session(options.connections), session(0)
        self._websockets = session(0, _raise_refusal)
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Close every connection; watches end with an error."""
        for session in (self._requests, self._streams, self._websockets):
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
                body = await _read(response, call)
                if status < 400:
                    obj: Object = decode(body, IN_LIST if call.verb == "list" else 0)
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

    @asynccontextmanager
    async def websocket(
        self, call: Call, protocol: str
    ) -> AsyncIterator["aiohttp.ClientWebSocketResponse[Literal[True]]"]:
        """Open a WebSocket of a subprotocol, and close it with the context.

        An expired token is renewed once, as for `exchange`.

        Raises:
            UnavailableError: the connection could not be opened.
        """
        try:
            websocket = await self._open(call, protocol)
        except UnauthorizedError:
            await self.access.renew()
            websocket = await self._open(call, protocol)
        async with websocket:
            yield websocket

    async def _open(
        self, call: Call, protocol: str
    ) -> "aiohttp.ClientWebSocketResponse[Literal[True]]":
        assert self._websockets is not None, "the client is used outside of its context"
        status = 0
        try:
            async with asyncio.timeout(self.options.request_seconds):
                websocket = await self._websockets.ws_connect(
                    self.access.host + call.path,
                    protocols=(protocol,),
                    params=call.query,
                    # With "Accept: application/json" the API server returns 406.
                    headers={"Accept": "*/*", **await self.access.headers()},
                    proxy=self.access.proxy,
                    server_hostname=self.access.server_name,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_SECONDS),
                )
            status = 101
            return websocket
        except ApiError as error:
            status = error.status
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            raise no_response(error, call) from error
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


async def _raise_refusal(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Raise the error in a response; aiohttp drops the body if a WebSocket is refused."""
    response = await send(request)
    if response.status >= 400:
        body = _status_object(await response.read())
        raise error_in(response.status, body, response.headers.get("Retry-After"))
    return response


async def _read(response: aiohttp.ClientResponse, call: Call) -> bytes:
    """Return the body of a response.

    Raises:
        LargePageError: The body is too large; the caller has to close the connection.
    """
    if call.max_bytes is None:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > call.max_bytes:
            raise LargePageError(f"{call} returns more than {call.max_bytes} bytes")
    return bytes(body)


def _status_object(body: bytes) -> Object:
    """Return the `Status` in a response; the response of a proxy may be plain text instead."""
    try:
        status = decode(body)
    except orjson.JSONDecodeError:
        status = None
    if isinstance(status, dict):
        return status
    return {"message": body.decode(errors="replace").strip()[:1024]}

"""Requests to a pod's port through a server that speaks the port-forward channels."""

import asyncio
import json
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from finetune_operator.kube.api_errors import (
    ApiError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)
from finetune_operator.kube.config import ClusterAccess
from finetune_operator.kube.credentials import TokenFile
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.login import Login
from finetune_operator.kube.port_forward import PodRequest, PodResponse, send_to_pod

PATH = "/api/v1/namespaces/ns/pods/tiny-0/portforward"
PORT = 9400
TOKEN = "eyJhbGciOi.secret"
DATA, ERROR = b"\0", b"\1"
ACCEPTED = b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nok"
REFUSED = b"dial tcp4 127.0.0.1:9400: connect: connection refused"

Pod = Callable[[web.WebSocketResponse], Awaitable[None]]


def frames(*sent: bytes) -> Pod:
    """Return a pod that sends these messages and closes the connection."""

    async def pod(channel: web.WebSocketResponse) -> None:
        for one in sent:
            await channel.send_bytes(one)

    return pod


async def refuse(channel: web.WebSocketResponse) -> None:
    """Close the connection with an error text before a request arrives."""
    await channel.send_bytes(ERROR + REFUSED)
    await channel.close(drain=False)


async def vanish(channel: web.WebSocketResponse) -> None:
    """Send a part of a response, and drop the connection without a close frame."""
    await channel.send_bytes(DATA + ACCEPTED[:30])
    channel.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


async def hang(channel: web.WebSocketResponse) -> None:
    """Send no response until the client closes the connection."""
    await channel.receive()


class ForwardingServer:
    """An API server that forwards one port.

    Attributes:
        heads: Headers of the requests for a WebSocket.
        requests: Messages of the client.
        refusals: Statuses with which the next WebSockets are refused, with their messages.
    """

    def __init__(self, pod: Pod) -> None:
        self.heads: list[dict[str, str]] = []
        self.requests: list[bytes] = []
        self.refusals: list[tuple[int, str]] = []
        self._pod = pod

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.heads.append(dict(request.headers))
        if self.refusals:
            status, message = self.refusals.pop(0)
            body = {"kind": "Status", "reason": "Refused", "message": message, "code": status}
            return web.json_response(body, status=status)
        assert (request.path, request.query_string) == (PATH, f"ports={PORT}")
        channel = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await channel.prepare(request)
        for one in (DATA, ERROR):
            await channel.send_bytes(one + struct.pack("<H", PORT))
        if self._pod is not refuse:
            self.requests.append(await channel.receive_bytes())
        await self._pod(channel)
        await channel.close()
        return channel


async def send(
    server: ForwardingServer, folder: Path, call: PodRequest
) -> tuple[PodResponse, dict[Any, int]]:
    """Send a request through the server, with a token; return the counted calls too."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.serve)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (folder / "token").write_text(TOKEN)
    login = Login(f"http://127.0.0.1:{runner.addresses[0][1]}", TokenFile(folder / "token"))
    try:
        async with HttpClient(ClusterAccess(login)) as client:
            return await send_to_pod(client, "ns", "tiny-0", PORT, call), client.calls.by_kind
    finally:
        await runner.cleanup()


PROFILE = PodRequest("POST", "/profile?steps=3", b'{"a": 1}')


def test_one_request_reaches_the_pod_with_the_users_token(tmp_path: Path) -> None:
    server = ForwardingServer(frames(DATA + ACCEPTED[:9], DATA + ACCEPTED[9:]))

    response, calls = asyncio.run(send(server, tmp_path, PROFILE))

    assert response == PodResponse(202, b"ok")
    assert calls == {("get", "pods", 101): 1}
    (head,) = server.heads
    assert (head["Authorization"], head["Accept"]) == (f"Bearer {TOKEN}", "*/*")
    (request,) = server.requests
    lines, body = request.split(b"\r\n\r\n")
    assert lines.split(b"\r\n") == [
        b"\0POST /profile?steps=3 HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        b"Content-Length: 8",
        b"Connection: close",
    ]
    assert json.loads(body) == {"a": 1}


def test_a_complete_response_is_returned_before_the_connection_closes(tmp_path: Path) -> None:
    async def pod(channel: web.WebSocketResponse) -> None:
        await channel.send_bytes(DATA + b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await hang(channel)

    response, _ = asyncio.run(send(ForwardingServer(pod), tmp_path, PROFILE))

    assert response == PodResponse(413, b"")


def test_an_expired_token_is_renewed_once(tmp_path: Path) -> None:
    server = ForwardingServer(frames(DATA + ACCEPTED))
    server.refusals.append((401, "Unauthorized"))

    response, calls = asyncio.run(send(server, tmp_path, PROFILE))

    assert response.status == 202
    assert calls == {("get", "pods", 401): 1, ("get", "pods", 101): 1}


@pytest.mark.parametrize(
    ("pod", "kind", "message"),
    [
        pytest.param(
            refuse,
            UnavailableError,
            f"port 9400 of pod ns/tiny-0 cannot be reached ({REFUSED.decode()}); check that its "
            "container runs and listens",
            id="no process listens",
        ),
        pytest.param(
            frames(DATA + ACCEPTED[:-1]),
            UnavailableError,
            "port 9400 of pod ns/tiny-0: the connection closed before the response was complete",
            id="the pod ends within its response",
        ),
        pytest.param(
            frames(DATA + ACCEPTED[:-1], ERROR + b"connection reset by peer"),
            UnavailableError,
            "port 9400 of pod ns/tiny-0: the connection closed before the response was complete "
            "(connection reset by peer)",
            id="the pod resets the connection within its response",
        ),
        pytest.param(
            frames(DATA + b"HTTP/1.1 200 OK\r\n\r\nhalf"),
            UnavailableError,
            "port 9400 of pod ns/tiny-0: the connection closed before the response was complete",
            id="a response without a length",
        ),
        pytest.param(
            vanish,
            UnavailableError,
            "port 9400 of pod ns/tiny-0: the connection closed before the response was complete",
            id="the API server drops the connection",
        ),
        pytest.param(
            hang,
            UnavailableError,
            "port 9400 of pod ns/tiny-0: no complete response within 0.5 s",
            id="no response",
        ),
        pytest.param(
            frames(*[DATA + bytes(2**19)] * 3),
            ApiError,
            "port 9400 of pod ns/tiny-0: the response is larger than 1048576 bytes",
            id="too large a response",
        ),
    ],
)
def test_a_response_that_is_not_complete_is_an_error(
    pod: Pod, kind: type[ApiError], message: str, tmp_path: Path
) -> None:
    seconds = 0.5 if pod is hang else 20.0
    call = PodRequest("POST", "/profile", seconds=seconds)

    with pytest.raises(ApiError) as raised:
        asyncio.run(send(ForwardingServer(pod), tmp_path, call))

    assert (type(raised.value), str(raised.value)) == (kind, message)


REMEDY = "request permission to get and create pods/portforward in ns"


@pytest.mark.parametrize(
    ("status", "kind", "server_message", "message"),
    [
        pytest.param(403, ForbiddenError, "not you", f"not you; {REMEDY}", id="by RBAC"),
        pytest.param(404, NotFoundError, 'pods "a" not found', None, id="no such pod"),
        pytest.param(400, InvalidError, "no host assigned", None, id="an unscheduled pod"),
        pytest.param(500, UnavailableError, "pod not found", None, id="a terminated pod"),
        pytest.param(401, UnauthorizedError, "Unauthorized", None, id="an unknown token"),
    ],
)
def test_a_refused_websocket_has_the_servers_message_and_not_the_token(
    status: int, kind: type[ApiError], server_message: str, message: str | None, tmp_path: Path
) -> None:
    server = ForwardingServer(frames())
    server.refusals += [(status, server_message)] * 2

    with pytest.raises(ApiError) as raised:
        asyncio.run(send(server, tmp_path, PROFILE))

    expected = (kind, status, message or server_message)
    assert (type(raised.value), raised.value.status, str(raised.value)) == expected
    assert TOKEN not in "".join(traceback.format_exception(raised.value))


def test_an_api_server_that_does_not_listen_is_an_error_without_the_token(tmp_path: Path) -> None:
    async def work() -> None:
        (tmp_path / "token").write_text(TOKEN)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        login = Login(f"http://127.0.0.1:{port}", TokenFile(tmp_path / "token"))
        async with HttpClient(ClusterAccess(login)) as client:
            await send_to_pod(client, "ns", "tiny-0", PORT, PROFILE)

    with pytest.raises(UnavailableError, match=f"no response to get {PATH}") as raised:
        asyncio.run(work())

    assert TOKEN not in "".join(traceback.format_exception(raised.value))

"""Send an HTTP request to a port of a pod through `pods/portforward`, from localhost in the pod.

`ftctl` calls it for the routes that accept loopback connections only. Each request opens a
WebSocket with the user's credentials.

The subprotocol is `v4.channel.k8s.io`, which kubelets support since Kubernetes 1.6
(kubernetes/kubernetes#33684); the API server passes it through. The first byte of a message is its
channel. The first two bytes of a channel repeat the port. kubectl's
`SPDY/3.1+portforward.k8s.io` (1.31) would need an implementation of SPDY.

A WebSocket is opened by GET. Up to Kubernetes 1.34 RBAC requires the verb `get` only; since 1.35
also `create` (kubernetes/kubernetes#134577).
"""

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from typing import Literal, cast

import aiohttp

from finetune_operator.kube.api_errors import ApiError, ForbiddenError, UnavailableError
from finetune_operator.kube.client import Call
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import PODS

_PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = b"\0", b"\1"
_PORT_BYTES = 2
_MAX_RESPONSE_BYTES = 2**20


@dataclass(frozen=True)
class PodRequest:
    """A request to a process in a pod.

    Attributes:
        path: Path and query, percent-encoded.
        body: JSON; empty for no body.
        seconds: Timeout from the connection to the end of the response.
    """

    method: str
    path: str
    body: bytes = b""
    seconds: float = 20.0


@dataclass(frozen=True)
class PodResponse:
    """The response of a process in a pod."""

    status: int
    body: bytes


async def send_to_pod(
    client: HttpClient, namespace: str, pod: str, port: int, request: PodRequest
) -> PodResponse:
    """Send a request to localhost:PORT in a pod and return the response of any status.

    Raises:
        ForbiddenError: the user may not forward ports of pods in the namespace.
        NotFoundError: the pod does not exist.
        InvalidError: the pod is not scheduled yet.
        UnavailableError: no process listens on the port, the connection closed before the response
            was complete, or the timeout passed; the request may have taken effect nevertheless.
        ApiError: the response is larger than 1 MiB.
    """
    place = f"port {port} of pod {namespace}/{pod}"
    call = Call("get", PODS, PODS.path(namespace, pod, "portforward"), {"ports": str(port)})
    try:
        async with asyncio.timeout(request.seconds), client.websocket(call, _PROTOCOL) as websocket:
            # If no process listens, the connection may close first; its error text is buffered.
            with suppress(ConnectionResetError):
                await websocket.send_bytes(_DATA + _encode(request))
            return await _receive(websocket, request.method, place)
    except ForbiddenError as error:
        remedy = f"request permission to get and create pods/portforward in {namespace}"
        raise ForbiddenError(error.status, error.reason, f"{error}; {remedy}") from error
    except TimeoutError as error:
        message = f"{place}: no complete response within {request.seconds:g} s"
        raise UnavailableError(0, "Timeout", message) from error


def _encode(request: PodRequest) -> bytes:
    lines = (
        f"{request.method} {request.path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(request.body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + request.body


async def _receive(
    websocket: "aiohttp.ClientWebSocketResponse[Literal[True]]", method: str, place: str
) -> PodResponse:
    """Return the response when it is complete; containerd closes the connection a second later."""
    channels = {_DATA: bytearray(), _ERROR: bytearray()}
    async for message in websocket:
        is_binary = message.type is aiohttp.WSMsgType.BINARY
        if not is_binary or (channel := message.data[:1]) not in channels:
            break
        channels[channel] += message.data[1:]
        if sum(map(len, channels.values())) > _MAX_RESPONSE_BYTES:
            sentence = f"the response is larger than {_MAX_RESPONSE_BYTES} bytes"
            raise ApiError(0, "ResponseTooLarge", f"{place}: {sentence}")
        response = _decode(method, bytes(channels[_DATA][_PORT_BYTES:]))
        if response is not None:
            return response
    text = channels[_ERROR][_PORT_BYTES:].decode(errors="replace").strip()
    if text and len(channels[_DATA]) <= _PORT_BYTES:
        sentence = f"{place} cannot be reached ({text}); check that its container runs and listens"
    else:
        reason = f" ({text})" if text else ""
        sentence = f"{place}: the connection closed before the response was complete{reason}"
    raise UnavailableError(0, "PortForwardFailed", sentence)


class _Received:
    """Stands for the socket that `HTTPResponse` reads."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> BytesIO:
        return BytesIO(self._data)


def _decode(method: str, data: bytes) -> PodResponse | None:
    """Parse a response; None if it is incomplete or does not state its length."""
    response = HTTPResponse(cast(socket.socket, _Received(data)), method=method)
    try:
        response.begin()
        if response.length is None and not response.chunked:
            return None
        return PodResponse(response.status, response.read())
    except (HTTPException, ValueError):
        return None

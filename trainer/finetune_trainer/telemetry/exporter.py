"""The small HTTP server of rank 0: GET /metrics, GET /progress, POST /checkpoint.

The operator and Prometheus pull; nothing is ever pushed, so a training pod holds no token.
"""

import json
import socketserver
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

_PORTS_TRIED = 20
_MAX_BODY_BYTES = 1024
_CONNECTION_TIMEOUT_SECONDS = 5.0
_METHODS = {"/metrics": "GET", "/progress": "GET", "/checkpoint": "POST"}


@dataclass(frozen=True)
class Routes:
    """What the server answers with.

    Attributes:
        metrics: returns the Prometheus page.
        progress: returns `Progress` as JSON text.
        request_checkpoint: asks the loop for a save at its next step boundary; returns at once.
    """

    metrics: Callable[[], bytes]
    progress: Callable[[], str]
    request_checkpoint: Callable[[], None]


class Exporter:
    """A server on a daemon thread, on the first free port from the configured one on."""

    def __init__(
        self, host: str, port: int, routes: Routes, *, warn: Callable[[str], None]
    ) -> None:
        """Bind and start; when no port is free, warn and serve nothing.

        Args:
            host: address to bind.
            port: first port tried; the next ones follow.
            routes: where answers come from.
            warn: receives a sentence when another port, or none, is used.
        """
        self._server = _bind(host, port, routes, warn)
        if self._server is not None:
            serve = self._server.serve_forever
            Thread(
                target=serve, kwargs={"poll_interval": 0.1}, name="exporter", daemon=True
            ).start()

    @property
    def url(self) -> str | None:
        """Address of the metrics page for this machine, or None when nothing is served."""
        if self._server is None:
            return None
        host, port = self._server.server_address[:2]
        name = "127.0.0.1" if host in ("0.0.0.0", "::") else str(host)
        return f"http://{name}:{port}/metrics"

    def close(self) -> None:
        """Stop answering and free the port; a second call does nothing."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Closing must not wait for a client that reads slowly.
    block_on_close = False

    def __init__(self, address: tuple[str, int], routes: Routes) -> None:
        self.routes = routes
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # The base class asks the name service who we are, which can take half a minute.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hangs up early is no event of the training run.
        return


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _CONNECTION_TIMEOUT_SECONDS

    def _route(self) -> None:
        routes, method = self.server.routes, _METHODS.get(self.path)
        if method is None:
            known = ", ".join(f"{method} {path}" for path, method in _METHODS.items())
            self._say(HTTPStatus.NOT_FOUND, f"nothing at {self.path}; there is {known}")
        elif self.command != method:
            self._say(HTTPStatus.METHOD_NOT_ALLOWED, f"use {method}", allow=method)
        elif self.path == "/metrics":
            self._answer(HTTPStatus.OK, routes.metrics(), CONTENT_TYPE_LATEST)
        elif self.path == "/progress":
            self._answer(HTTPStatus.OK, routes.progress().encode())
        else:
            self._request_checkpoint()

    # http.server looks the methods up by these names.
    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _route  # noqa: N815

    def _request_checkpoint(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            self._say(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "send no body to /checkpoint")
            return
        self.rfile.read(int(length))
        self.server.routes.request_checkpoint()
        self._say(HTTPStatus.ACCEPTED, "a checkpoint will be saved at the next step boundary")

    def log_message(self, format: str, *args: Any) -> None:
        # A line a scrape would bury the training log.
        return

    def _say(self, status: HTTPStatus, message: str, *, allow: str | None = None) -> None:
        body = json.dumps({"message": message}).encode() + b"\n"
        # An unread body would be taken for the next request.
        self.close_connection = self.close_connection or status >= HTTPStatus.BAD_REQUEST
        self._answer(status, body, allow=allow)

    def _answer(
        self,
        status: HTTPStatus,
        body: bytes,
        content_type: str = "application/json",
        *,
        allow: str | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if allow is not None:
            self.send_header("Allow", allow)
        self.end_headers()
        self.wfile.write(body)


def _bind(host: str, port: int, routes: Routes, warn: Callable[[str], None]) -> _Server | None:
    last = min(port + _PORTS_TRIED, 65536)
    problem: OSError | None = None
    for candidate in range(port, last):
        try:
            server = _Server((host, candidate), routes)
        except OSError as error:
            problem = problem or error
            continue
        if problem is not None:
            warn(
                f"spec.observability.metricsPort {port} on {host} cannot be used "
                f"({problem.strerror}); serving on {candidate} instead"
            )
        return server
    reason = problem.strerror if problem else "no port left"
    warn(
        f"spec.observability.metricsPort {port} to {last - 1} on {host} cannot be used ({reason}); "
        "no metrics are served; choose another port"
    )
    return None

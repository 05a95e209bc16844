"""Minimal HTTP server of a node's page: it calls a function for each path."""

import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from threading import Lock, Thread
from typing import Any, NamedTuple

_MAX_BODY_BYTES = 1024
_CONNECTION_TIMEOUT_SECONDS = 5.0
_MAX_CONNECTIONS = 64  # each has a thread
_CLUSTER_DOMAINS = (".svc", ".cluster.local")
JSON = "application/json"

Response = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""


class Route(NamedTuple):
    """Handler of a path.

    Attributes:
        method: HTTP method of the request.
        handle: Returns the response to a body at once, in any thread.
        max_body_bytes: Limit of a request's body; a longer one is refused unread.
        is_local: Whether connections from outside the pod or machine are refused.
        is_any_host: Whether the request may name the server by any name; for a route whose body
            contains a secret.
    """

    method: str
    handle: Callable[[bytes], Response]
    max_body_bytes: int = _MAX_BODY_BYTES
    is_local: bool = False
    is_any_host: bool = False


Routes = Mapping[str, Route]
"""Routes by path."""


class PageServer(ThreadingHTTPServer):
    """Server with daemon threads, which serves from its creation until it is closed.

    Each connection has a thread. A connection beyond the limit closes the oldest one, so idle
    clients do not block others.
    """

    daemon_threads = True
    # Closing must not wait for a client that reads slowly.
    block_on_close = False

    def __init__(self, listener: socket.socket, routes: Routes) -> None:
        """Serve clients of `listener`, which closes with this server."""
        self.routes = routes
        self._lock = Lock()
        self._connections: deque[Any] = deque()  # oldest first
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        target = partial(self.serve_forever, poll_interval=0.1)
        Thread(target=target, name="page", daemon=True).start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, and close the oldest connection beyond the limit."""
        with self._lock:
            self._connections.append(request)
            if len(self._connections) > _MAX_CONNECTIONS:
                with suppress(OSError):  # the client has disconnected
                    self._connections.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that its thread has served."""
        with self._lock, suppress(ValueError):  # removed as the oldest
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, except if the client closed the connection early."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = _CONNECTION_TIMEOUT_SECONDS
    error_content_type = JSON
    error_message_format = '{"message": "%(explain)s"}\n'

    def _route(self) -> None:
        routes, length = self.server.routes, self.headers.get("Content-Length", "0")
        if self.path not in routes:
            known = ", ".join(f"{route.method} {path}" for path, route in routes.items())
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"there is {known}")
            return
        route = routes[self.path]
        if self.command != route.method:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, explain=f"use {route.method}")
        elif route.is_local and not ip_address(self.client_address[0]).is_loopback:
            self.send_error(HTTPStatus.FORBIDDEN, explain="connect from inside the pod or machine")
        elif "Origin" in self.headers:
            self.send_error(HTTPStatus.FORBIDDEN, explain="web pages may not send requests")
        elif not route.is_any_host and not _is_own_name(self.headers.get("Host", "")):
            explain = "use the IP address of the pod or machine, localhost or a name of the cluster"
            self.send_error(HTTPStatus.FORBIDDEN, explain=explain)
        elif not length.isdecimal() or int(length) > route.max_body_bytes:
            most = f"send at most {route.max_body_bytes} bytes"
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, explain=most)
        else:
            status, content_type, body = route.handle(self.rfile.read(int(length)))
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    # http.server looks the methods up by these names.
    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _route  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: a line per scrape would hide the training log."""


def _is_own_name(host: str) -> bool:
    """Return whether `host` (NAME[:PORT]) is no public name, which may resolve to any address.

    A web page of such a name could read the responses (DNS rebinding). Clients other than browsers
    may omit the header.
    """
    name = host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
    if "." not in name or name.endswith(_CLUSTER_DOMAINS) or name == socket.gethostname():
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True

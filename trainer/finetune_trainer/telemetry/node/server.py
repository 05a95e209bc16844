"""The small HTTP server of a node's page: it calls a function for each path."""

import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

_MAX_BODY_BYTES = 1024
_CONNECTION_TIMEOUT_SECONDS = 5.0
JSON = "application/json"

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""

Routes = Mapping[str, tuple[str, Callable[[], Answer]]]
"""By path: the method that asks there, and what makes the answer, at once and in any thread."""


class PageServer(ThreadingHTTPServer):
    """Answers from daemon threads, from its making until it is closed."""

    daemon_threads = True
    # Closing must not wait for a client that reads slowly.
    block_on_close = False

    def __init__(self, listener: socket.socket, routes: Routes) -> None:
        """Answer those who connect to `listener`, which closes with this server."""
        self.routes = routes
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        target = partial(self.serve_forever, poll_interval=0.1)
        Thread(target=target, name="page", daemon=True).start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, but for a client that hangs up early: that is no event here."""
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
            known = ", ".join(f"{method} {path}" for path, (method, _) in routes.items())
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"there is {known}")
            return
        method, answer = routes[self.path]
        if self.command != method:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, explain=f"use {method}")
        elif not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, explain="send no body")
        else:
            self.rfile.read(int(length))  # else it would be taken for the next request
            status, content_type, body = answer()
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    # http.server looks the methods up by these names.
    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _route  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: a line a scrape would bury the training log."""

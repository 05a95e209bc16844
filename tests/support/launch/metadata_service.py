"""A stand-in for the metadata service of an Azure machine, on a port of this one."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """A metadata service of the machine `node-1`.

    Attributes:
        is_cut_off: whether its answers end before they should.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.is_cut_off = False
        self.asked = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.headers["Metadata"] != "true":
                    self.send_error(400)
                    return
                is_name = self.path.startswith("/metadata/instance/compute/name?")
                if not is_name:
                    outer.asked.set()
                text = "node-1" if is_name else json.dumps({"Events": outer.events})
                self.send_response(200)
                self.send_header("Content-Length", str(len(text) + outer.is_cut_off))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{port}/metadata/scheduledevents?api-version=2020-07-01"


def event(kind: str, machine: str, **fields: Any) -> dict[str, Any]:
    """Return one scheduled event that has begun already, unless `NotBefore` says otherwise."""
    return {"EventId": "e", "EventType": kind, "Resources": [machine], "NotBefore": ""} | fields


@contextmanager
def metadata_service() -> Iterator[Service]:
    """Serve until the block ends."""
    made = Service()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()

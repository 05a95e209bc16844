"""Pages of metrics that a test writes, served over HTTP for a Prometheus to scrape."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Page = Callable[[], str]


@contextmanager
def served(pages: Mapping[str, Page], *, missing: int = 0) -> Iterator[str]:
    """Serve each page at its path until the end of the block; yield host and port.

    An answer ends `missing` bytes before the length that it names.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages[self.path]().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a page is scraped every second."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def line(name: str, value: float, **labels: str | int) -> str:
    """Return one sample as a page has it."""
    inside = ",".join(f'{key}="{one}"' for key, one in labels.items())
    return f"{name}{{{inside}}} {value}"

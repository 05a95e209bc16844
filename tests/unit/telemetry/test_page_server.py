"""The server of a node's page: requests of web pages, and idle clients."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from http import HTTPStatus
from http.client import HTTPConnection

import pytest

from finetune_trainer.telemetry.node import server as page_server
from finetune_trainer.telemetry.node.server import JSON, PageServer, Response, Route


@pytest.fixture
def called() -> list[bytes]:
    return []


@pytest.fixture
def port(called: list[bytes]) -> Iterator[int]:
    def handle(body: bytes) -> Response:
        called.append(body)
        return HTTPStatus.OK, JSON, b"{}"

    server = PageServer(
        socket.create_server(("127.0.0.1", 0)),
        {
            "/progress": Route("GET", handle),
            "/checkpoint": Route("POST", handle, is_local=True),
            "/ranks": Route("POST", handle, is_any_host=True),
        },
    )
    yield server.server_address[1]
    server.close()


def ask(port: int, method: str, path: str, headers: dict[str, str]) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/progress"), ("POST", "/checkpoint")])
def test_a_public_name_that_resolves_to_this_page_is_refused(
    port: int, called: list[bytes], host: str, method: str, path: str
) -> None:
    assert ask(port, method, path, {"Host": host}) == HTTPStatus.FORBIDDEN
    assert not called


@pytest.mark.parametrize("path", ["/checkpoint", "/ranks"])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:29501"])
def test_a_web_page_cannot_post(port: int, called: list[bytes], origin: str, path: str) -> None:
    headers = {"Host": "localhost", "Origin": origin}
    assert ask(port, "POST", path, headers) == HTTPStatus.FORBIDDEN
    assert not called


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "127.0.0.1:29501",
        "10.1.2.3:29501",
        "[::1]:29501",
        "train-0.train.team.svc",
        "train-0.train.team.svc.cluster.local:29501",
        socket.gethostname(),
    ],
)
def test_prometheus_and_a_forwarded_port_read_the_page(port: int, host: str) -> None:
    assert ask(port, "GET", "/progress", {"Host": host}) == HTTPStatus.OK


def test_nodes_of_the_job_report_by_any_name_of_rank_zero(port: int) -> None:
    assert ask(port, "POST", "/ranks", {"Host": "rank-0.hpc.example"}) == HTTPStatus.OK


def test_500_idle_connections_stop_no_other_client_and_hold_few_threads(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server._Handler, "timeout", 60)  # no connection ends by itself
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(500)
        ]
        assert ask(port, "GET", "/progress", {}) == HTTPStatus.OK
        for one in idle[:400]:  # the oldest are closed
            one.settimeout(10)
            assert one.recv(1) == b""

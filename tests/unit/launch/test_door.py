"""The port of rank 0 in a job of several nodes: who passes the door, and who is closed out."""

import hmac
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from finetune_trainer.errors import Preempted, TrainerError
from finetune_trainer.launch import door as door_module
from finetune_trainer.launch.door import MAX_HANDSHAKES, knock
from finetune_trainer.launch.start_ranks import Node, StorePort
from finetune_trainer.launch.store_port import open_store_port
from support.launch.launches import free_port

KEY = secrets.token_hex(32).encode()
HOST = "127.0.0.1"


def never() -> bool:
    return False


@contextmanager
def node_0(port: int) -> Iterator[StorePort]:
    with open_store_port(Node(0, HOST, port, KEY), never, 10.0) as store:
        yield store


@pytest.fixture
def port() -> Iterator[int]:
    """Serve a store that holds a value, behind a door, and return the published port."""
    published = free_port()
    with node_0(published) as where:
        assert where.listener is not None
        store = TCPStore(
            where.host, where.port, is_master=True, wait_for_workers=False,
            master_listen_fd=where.listener.detach(),
        )  # fmt: skip
        store.set("address of rank 0", "secret")
        yield published


def client(port: int, seconds: float = 10.0) -> TCPStore:
    return TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=seconds))


def proof(key: bytes, role: bytes, theirs: bytes, own: bytes) -> bytes:
    return hmac.digest(key, role + theirs + own, "sha256")


def shake(connection: socket.socket, key: bytes) -> tuple[bytes, bytes]:
    """Do what an entrance does; return the sent bytes and the response."""
    theirs, own = connection.recv(32, socket.MSG_WAITALL), secrets.token_bytes(32)
    sent = own + proof(key, b"entrance", theirs, own)
    connection.sendall(sent)
    return sent, read(connection, 32)


def read(connection: socket.socket, size: int) -> bytes:
    with suppress(ConnectionResetError):  # closed with unread bytes
        return connection.recv(size, socket.MSG_WAITALL)
    return b""


def connected(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=60)


def test_ranks_of_another_node_use_the_store_through_both_ends(port: int) -> None:
    with open_store_port(Node(1, HOST, port, KEY), never, 10.0) as where:
        assert (where.host, where.port, where.listener) == (HOST, port, None)
        assert where.entrance is not None
        store, other = client(where.entrance), client(where.entrance)
        assert store.get("address of rank 0") == b"secret"
        store.set("large", "x" * 3_000_000)
        assert len(other.get("large")) == 3_000_000


def test_a_stranger_gets_no_response_of_the_store(port: int) -> None:
    with pytest.raises(DistNetworkError):
        client(port, 0.5)
    with connected(port) as stranger:
        stranger.sendall(b"\x00" * 64)
        assert len(read(stranger, 1000)) == 32  # the nonce, then the end


def test_a_wrong_key_is_refused_without_the_proof_of_the_door(port: int) -> None:
    with connected(port) as stranger:
        assert shake(stranger, b"another key")[1] == b""
    with pytest.raises(ConnectionError, match="closed before a proof of the attempt's key"):
        knock(b"another key", (HOST, port))


def test_a_recorded_handshake_opens_the_door_once(port: int) -> None:
    with connected(port) as own:
        sent, given = shake(own, KEY)
        assert len(given) == 32
    with connected(port) as stranger:
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        stranger.sendall(sent)
        assert read(stranger, 32) == b""


def test_half_a_handshake_is_closed_after_its_time(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "HANDSHAKE_SECONDS", 0.2)
    with connected(port) as slow:
        assert len(slow.recv(32, socket.MSG_WAITALL)) == 32
        slow.sendall(b"\x00" * 40)
        assert read(slow, 1) == b""


def test_idle_connections_block_no_node(port: int) -> None:
    with ExitStack() as idle:
        silent = [idle.enter_context(connected(port)) for _ in range(MAX_HANDSHAKES + 100)]
        with connected(port) as own:
            assert len(shake(own, KEY)[1]) == 32
        assert len(silent[0].recv(32)) == 32
        assert read(silent[0], 1) == b""  # the oldest gave way


@pytest.mark.parametrize("reflects", [False, True])
def test_a_program_at_the_port_of_rank_0_without_the_key_gets_no_rank(reflects: bool) -> None:
    with socket.create_server((HOST, 0)) as server:

        def pretend() -> None:
            connection = server.accept()[0]
            with connection:
                connection.sendall(b"\x00" * 32)
                given = connection.recv(64, socket.MSG_WAITALL)
                connection.sendall(given[32:] if reflects else b"\x00" * 32)

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(ConnectionError, match="does not know the attempt's key"):
            knock(KEY, server.getsockname()[:2])
        pretending.join()


def test_a_node_waits_for_the_door_before_its_ranks_start() -> None:
    port, has_started = free_port(), threading.Event()
    node = Node(1, HOST, port, KEY)

    def wait() -> None:
        with open_store_port(node, never, 60.0):
            has_started.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not has_started.wait(0.3)
    with node_0(port) as where, where.listener or ExitStack():
        waiting.join()
    assert has_started.is_set()


def test_a_connection_to_the_store_ends_on_both_nodes() -> None:
    port = free_port()
    with ExitStack() as ending:
        where = ending.enter_context(node_0(port))
        assert where.listener is not None
        with (
            where.listener as store,
            open_store_port(Node(1, HOST, port, KEY), never, 10.0) as other,
        ):
            assert other.entrance is not None
            store.accept()[0].close()  # of the node that waited for the door
            with connected(other.entrance) as rank, store.accept()[0] as served:
                rank.sendall(b"set")
                assert served.recv(3, socket.MSG_WAITALL) == b"set"
                rank.close()
                assert read(served, 1) == b""
            with connected(other.entrance) as rank:
                rank.sendall(b"set")
                store.accept()[0].close()
                assert read(rank, 1) == b""
            ending.close()
            with connected(other.entrance) as rank:
                assert read(rank, 1) == b""


def test_a_node_0_that_does_not_respond_is_named_by_the_published_address() -> None:
    port = free_port()
    with (
        pytest.raises(TrainerError, match=f"rank 0 does not respond at {HOST}:{port} after 0 s"),
        open_store_port(Node(1, HOST, port, KEY), never, 0.0),
    ):
        pass
    with (
        pytest.raises(Preempted),
        open_store_port(Node(1, HOST, port, KEY), lambda: True, 60.0),
    ):
        pass


def test_a_port_that_is_taken_is_named_with_a_key_too() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TrainerError, match=f"port {port} of .* cannot be bound"), node_0(port):
            pass

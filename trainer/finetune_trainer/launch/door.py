"""Relay the store of rank 0 to the attempt's own nodes only: the ends of a connection prove a key.

Called by `store_port` on several nodes. Node 0 runs a door: it serves the published port and relays
to the store, which listens on loopback. Every other node runs an entrance: it serves a loopback
port for its ranks, and dials the door. Relayed bytes are neither encrypted nor authenticated.

The handshake has three messages, each nonce 32 random bytes, each proof an HMAC-SHA256:

    door -> entrance  nonce_d
    entrance -> door  nonce_e, HMAC(key, "entrance" nonce_d nonce_e)
    door -> entrance  HMAC(key, "door" nonce_d nonce_e)

A proof covers the role and both nonces, so a recorded or reflected one is refused.
"""

import asyncio
import hmac
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from threading import Thread

HANDSHAKE_SECONDS = 5.0
MAX_HANDSHAKES = 512  # unfinished; a further one ends the oldest, so idle connections block no node
_NONCE_BYTES = PROOF_BYTES = 32
_DIALS = 3
_CHUNK_BYTES = 1 << 16
_LOOPBACK = "127.0.0.1"
_MAX_FILES = 1 << 16  # the door needs two per connection, and a rank opens two or three

_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def proof(key: bytes, role: str, door_nonce: bytes, entrance_nonce: bytes) -> bytes:
    """Return the proof that the end of a connection with this role knows the key."""
    return hmac.digest(key, role.encode() + door_nonce + entrance_nonce, "sha256")


@contextmanager
def door(listener: socket.socket, key: bytes, store_port: int) -> Iterator[None]:
    """Serve `listener` while the block runs, and relay to the loopback port of the store."""
    unfinished: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unfinished[writer] = None
        if len(unfinished) > MAX_HANDSHAKES:
            oldest = next(iter(unfinished))
            del unfinished[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                is_ours = await _challenge(reader, writer, key)
        finally:
            unfinished.pop(writer, None)
        if is_ours:
            store = await asyncio.open_connection(_LOOPBACK, store_port)
            await _relay((reader, writer), store)

    _allow_many_files()
    with _served(listener, serve):
        yield


@contextmanager
def entrance(listener: socket.socket, key: bytes, host: str, port: int) -> Iterator[None]:
    """Serve `listener` while the block runs, and relay to the store behind the door."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _relay((reader, writer), await _dial_again(host, port, key))

    with _served(listener, serve):
        yield


def knock(key: bytes, address: tuple[str, int]) -> None:
    """Complete one handshake with the door at `address`, then close the connection.

    Raises:
        OSError: The door does not respond, or its proof or ours is refused.
    """

    async def dial() -> None:
        _, writer = await _dial(*address, key)
        writer.close()

    asyncio.run(dial())


async def _challenge(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes
) -> bool:
    """Whether the other end proves the key; only then it gets the proof of the door."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(nonce)
    response = await reader.readexactly(_NONCE_BYTES + PROOF_BYTES)
    theirs, given = response[:_NONCE_BYTES], response[_NONCE_BYTES:]
    if not hmac.compare_digest(given, proof(key, "entrance", nonce, theirs)):
        return False
    writer.write(proof(key, "door", nonce, theirs))
    return True


async def _dial(host: str, port: int, key: bytes) -> _Stream:
    """Return a connection to the store behind a door.

    Raises:
        OSError: As `knock`.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                nonce, theirs = (
                    secrets.token_bytes(_NONCE_BYTES),
                    await reader.readexactly(_NONCE_BYTES),
                )
                writer.write(nonce + proof(key, "entrance", theirs, nonce))
                given = await reader.readexactly(PROOF_BYTES)
                if not hmac.compare_digest(given, proof(key, "door", theirs, nonce)):
                    raise ConnectionError("the program there does not know the attempt's key")
            except BaseException:
                writer.close()
                raise
    except TimeoutError:
        text = f"no proof of the attempt's key within {HANDSHAKE_SECONDS:.0f} s"
        raise TimeoutError(text) from None
    except asyncio.IncompleteReadError:
        text = "the connection was closed before a proof of the attempt's key"
        raise ConnectionError(text) from None
    return reader, writer


async def _dial_again(host: str, port: int, key: bytes) -> _Stream:
    """Dial until it succeeds, at most `_DIALS` times, because few clients of the store retry."""
    for _ in range(_DIALS - 1):
        with suppress(OSError):  # a busy door may let a handshake time out
            return await _dial(host, port, key)
    return await _dial(host, port, key)


async def _relay(one: _Stream, other: _Stream) -> None:
    """Pass bytes on in both directions until one end closes; then close `other`."""
    with closing(other[1]):
        pumps = [
            asyncio.create_task(_pump(one[0], other[1])),
            asyncio.create_task(_pump(other[0], one[1])),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # a lost connection ends the relay as a closed one does
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()


@contextmanager
def _served(listener: socket.socket, serve: _Serve) -> Iterator[None]:
    """Run `serve` for each connection, in an event loop of its own thread."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, asyncio.IncompleteReadError):
            await serve(reader, writer)

    async def run() -> None:
        server = await asyncio.start_server(connected, sock=listener, backlog=128)
        await stop.wait()
        server.close()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = Thread(target=work, name="door", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

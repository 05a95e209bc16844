"""Open the way of this node's ranks to the store of rank 0, before the ranks start.

Called by `supervisor`. With the attempt's key the store listens on loopback, and the published port
accepts the attempt's own nodes only (`door`); without a key the store itself serves that port.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from finetune_trainer.config import ENV_RDZV_ENDPOINT
from finetune_trainer.errors import TrainerError
from finetune_trainer.launch.start_ranks import Node, StorePort
from finetune_trainer.rendezvous import wait_for_rank_zero

_LOOPBACK = "127.0.0.1"


@contextmanager
def open_store_port(
    node: Node, should_stop: Callable[[], bool], limit_seconds: float
) -> Iterator[StorePort]:
    """Provide the store's port to this node's ranks while the block runs.

    Node 0 binds the port before rank 0 exists: no other program can take it meanwhile, and
    connections of ranks that are faster than rank 0 wait instead of being refused. With a key
    another node waits here for the door, because its entrance accepts connections at once.

    Raises:
        TrainerError: The port is taken, or node 0 did not respond within `limit_seconds`.
        Preempted: `should_stop` returned True.
    """
    if node.key is None:
        # Node 0's own name may not resolve before its pod is ready.
        listener = _listen(node) if node.rank == 0 else None
        port = listener.getsockname()[1] if listener else node.port
        yield StorePort(_LOOPBACK if listener else node.host, port, listener)
        return
    from finetune_trainer.launch.door import door, entrance, knock  # asyncio takes time and memory

    with _loopback() as listener:
        port = listener.getsockname()[1]
        if node.rank == 0:
            with _listen(node) as published, door(published, node.key, port):
                yield StorePort(_LOOPBACK, port, listener)
            return
        wait_for_rank_zero(
            node.host,
            node.port,
            should_stop,
            limit_seconds=limit_seconds,
            connect=partial(knock, node.key),
        )
        with entrance(listener, node.key, node.host, node.port):
            yield StorePort(node.host, node.port, entrance=port)


def _loopback() -> socket.socket:
    return socket.create_server((_LOOPBACK, 0))


def _listen(node: Node) -> socket.socket:
    """Listen on the loopback address of a single node, or on all addresses for other nodes."""
    if node.port == 0:
        return _loopback()
    try:
        if socket.has_dualstack_ipv6():
            address = ("::", node.port)
            return socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", node.port))
    except OSError as error:
        raise TrainerError(
            f"port {node.port} of {ENV_RDZV_ENDPOINT} cannot be bound ({error}); "
            "end the process that holds it, or name another port"
        ) from error

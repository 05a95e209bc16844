"""Start the ranks of this node with their rank numbers and the address of the rendezvous.

Called by `supervisor` once per start and restart. It does not wait for a rank and imports no torch.
"""

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.config import ENV_NODE_RANK, ENV_RDZV_ENDPOINT, TrainConfig
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.rendezvous import ENV_STORE_FD


@dataclass(frozen=True)
class Node:
    """Place of this node, from its environment.

    Attributes:
        host: Address of node 0, which runs rank 0 and its store.
        port: Port of that store; 0 on a single node, which chooses a free one.
    """

    rank: int
    host: str
    port: int


def read_node(config: TrainConfig, environ: Mapping[str, str]) -> Node:
    """Return the place of this node.

    Raises:
        ConfigError: A variable is missing or invalid.
    """
    nnodes = config.world.nnodes
    if nnodes == 1:
        return Node(rank=0, host="127.0.0.1", port=0)
    text = environ.get(ENV_NODE_RANK, environ.get("JOB_COMPLETION_INDEX", ""))
    if not text.isdecimal() or int(text) >= nnodes:
        raise ConfigError(
            f"{ENV_NODE_RANK} is {text!r}; with spec.topology.nodes {nnodes} it must be 0 to "
            f"{nnodes - 1} (JOB_COMPLETION_INDEX serves as well)"
        )
    endpoint = environ.get(ENV_RDZV_ENDPOINT, "")
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"{ENV_RDZV_ENDPOINT} is {endpoint!r}; with spec.topology.nodes {nnodes} it must be "
            "HOST:PORT of node 0"
        )
    return Node(rank=int(text), host=host.strip("[]"), port=int(port))


def start_ranks(
    config: TrainConfig,
    node: Node,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    restart: int,
    current_folder: Path | None = None,
) -> dict[int, "subprocess.Popen[bytes]"]:
    """Start the processes of this node's ranks, each the leader of its own process group.

    Their stderr is a pipe that the caller must read.

    Node 0 binds the port of the store here and passes the socket to rank 0: no other program can
    take the port meanwhile, and connections of ranks that are faster than rank 0 wait instead of
    being refused. `arguments` are passed to the Python interpreter; `restart` counts the earlier
    starts. The ranks start in `current_folder`, or in the current folder of this process.

    Raises:
        TrainerError: The port of the store is taken.
    """
    num_ranks = config.world.nproc_per_node
    processes = {}
    with _listen(node) if node.rank == 0 else nullcontext() as listener:
        for local_rank in range(num_ranks):
            rank = node.rank * num_ranks + local_rank
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(config.world.world_size),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                # Node 0's own name may not resolve before its pod is ready.
                "MASTER_ADDR": "127.0.0.1" if node.rank == 0 else node.host,
                "MASTER_PORT": str(listener.getsockname()[1] if listener else node.port),
                "TORCHELASTIC_RESTART_COUNT": str(restart),
            }
            inherited = [listener.fileno()] if listener and rank == 0 else []
            if inherited:
                place[ENV_STORE_FD] = str(inherited[0])
            processes[rank] = subprocess.Popen(
                [sys.executable, "-P", *arguments],  # no imports from the current folder
                env={**environ, **place},
                cwd=current_folder,
                pass_fds=inherited,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
    return processes


def _listen(node: Node) -> socket.socket:
    """Listen on the loopback address of a single node, or on all addresses for other nodes."""
    try:
        if node.port == 0:
            return socket.create_server((node.host, 0))
        if socket.has_dualstack_ipv6():
            address = ("::", node.port)
            return socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", node.port))
    except OSError as error:
        raise TrainerError(
            f"port {node.port} of {ENV_RDZV_ENDPOINT} cannot be bound ({error}); "
            "end the process that holds it, or name another port"
        ) from error

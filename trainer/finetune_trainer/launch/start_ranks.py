"""Start the ranks of this node with their rank numbers and the address of the rendezvous.

Called by `supervisor` once per start and restart. It does not wait for a rank and imports no torch.
"""

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from finetune_trainer.config import ENV_NODE_RANK, ENV_RDZV_ENDPOINT, ENV_RDZV_KEY, TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.rendezvous import ENV_STORE_ENTRANCE, ENV_STORE_FD

_MIN_KEY_CHARACTERS = 32


@dataclass(frozen=True)
class Node:
    """Place of this node, from its environment.

    Attributes:
        host: Address of node 0, which runs rank 0 and its store.
        port: Port of that store; 0 on a single node, which chooses a free one.
        key: Key of the attempt, which the nodes prove to each other; None without a key.
    """

    rank: int
    host: str
    port: int
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StorePort:
    """How the ranks of this node connect to the store of rank 0.

    Attributes:
        host: Host of the store.
        port: Port of the store.
        listener: Socket on which rank 0 serves the store; only on node 0.
        entrance: Loopback port that relays to the store; None to connect to `host` and `port`.
    """

    host: str
    port: int
    listener: socket.socket | None = None
    entrance: int | None = None


def read_node(config: TrainConfig, environ: Mapping[str, str], key: str | None = None) -> Node:
    """Return the place of this node; `key` is the attempt's key, unused on a single node.

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
    if key is not None and len(key) < _MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"{ENV_RDZV_KEY} has {len(key)} characters; set the same random text of at least "
            f"{_MIN_KEY_CHARACTERS} characters on every node, or on none"
        )
    secret = key.encode() if key is not None else None
    return Node(rank=int(text), host=host.strip("[]"), port=int(port), key=secret)


def start_ranks(
    config: TrainConfig,
    node: Node,
    store: StorePort,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    restart: int,
    current_folder: Path | None = None,
) -> dict[int, "subprocess.Popen[bytes]"]:
    """Start the processes of this node's ranks, each the leader of its own process group.

    Their stderr is a pipe that the caller must read.

    Rank 0 inherits the socket of `store`, which is closed here. `arguments` are passed to the
    Python interpreter; `restart` counts the earlier starts. The ranks start in `current_folder`, or
    in the current folder of this process.
    """
    num_ranks = config.world.nproc_per_node
    processes = {}
    with store.listener or nullcontext() as listener:
        for local_rank in range(num_ranks):
            rank = node.rank * num_ranks + local_rank
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(config.world.world_size),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": store.host,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_RESTART_COUNT": str(restart),
            }
            inherited = [listener.fileno()] if listener and rank == 0 else []
            if inherited:
                place[ENV_STORE_FD] = str(inherited[0])
            if store.entrance is not None:
                place[ENV_STORE_ENTRANCE] = str(store.entrance)
            processes[rank] = subprocess.Popen(
                [sys.executable, "-P", *arguments],  # no imports from the current folder
                env={**environ, **place},
                cwd=current_folder,
                pass_fds=inherited,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
    return processes

"""Find the transports between ranks in the log of NCCL.

`cuda_environment` names the file of the log, and `interconnect` reads the file once, after the
first collective. NCCL has no API for the transport of a connection.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ENV_LOG = "FINETUNE_NCCL_LOG"  # set by the rank for itself: path of the log that it may read
SOCKETS = "NET/Socket"

_MAX_LOG_BYTES = 16 * 2**20  # a log of one start is below 1 MiB
_MAX_NAMES = 8
_ON_NODE = ("SHM", "P2P")  # most distant first
# One line per connection, NCCL 2.12 to 2.31. Devices are numbers, or bus ids before 2.19. Names of
# network plugins may contain spaces ("AWS Libfabric"). "(3)" is the rank whose NIC is used.
_CONNECTION = re.compile(
    rb"NCCL INFO Channel \d{1,6}(?:/\d{1,6})? : "
    rb"\d{1,9}\[[0-9a-f]{1,16}\] -> \d{1,9}\[[0-9a-f]{1,16}\] (?:\[(?:send|receive)\] )?via "
    rb"(?:(?P<on_node>P2P|SHM)/"
    rb"|(?P<net>NET/[A-Za-z0-9][A-Za-z0-9 _.+-]{0,31})/\d{1,6}(?:\(\d{1,9}\))?(?P<gpu>/GDRDMA)?)"
)


@dataclass(frozen=True)
class Transports:
    """Transports of the connections of one rank, or of several.

    Attributes:
        names: `NET/<network>`, `SHM` and `P2P`, most distant first; empty if not known.
        has_gpu_direct: Whether a network reads and writes GPU memory without host memory.
    """

    names: tuple[str, ...] = ()
    has_gpu_direct: bool = False

    @classmethod
    def of_log(cls, log: bytes) -> Self:
        """Return the transports of all connections in a log of NCCL; other lines are ignored."""
        names: set[str] = set()
        has_gpu_direct = False
        for found in _CONNECTION.finditer(log):
            name = (found["net"] or found["on_node"]).decode("ascii")
            if len(names) < _MAX_NAMES or name in names:
                names.add(name)
                has_gpu_direct = has_gpu_direct or found["gpu"] is not None
        return cls(_by_distance(names), has_gpu_direct)

    @classmethod
    def of_all(cls, ranks: Iterable["Transports"]) -> Self:
        """Return the transports that any of the ranks uses."""
        known = list(ranks)
        names = {name for one in known for name in one.names}
        return cls(_by_distance(names), any(one.has_gpu_direct for one in known))

    def __str__(self) -> str:
        """Return the names as the value of a label: `NET/IB,P2P`."""
        return ",".join(self.names)


def take_log(environ: Mapping[str, str]) -> Transports:
    """Read and delete the log of this process; the transports are not known without one."""
    path = environ.get(ENV_LOG)
    if path is None:
        return Transports()
    try:
        with Path(path).open("rb") as file:
            found = Transports.of_log(file.read(_MAX_LOG_BYTES))
    except OSError:
        found = Transports()
    delete_log(environ)
    return found


def delete_log(environ: Mapping[str, str]) -> None:
    """Delete the log of this process, if there is one; NCCL may still write to it."""
    path = environ.get(ENV_LOG)
    if path is not None:
        with suppress(OSError):
            Path(path).unlink(missing_ok=True)


def _by_distance(names: set[str]) -> tuple[str, ...]:
    """Sort networks before transports within a node, and sockets behind all other networks."""
    networks = sorted(names - set(_ON_NODE), key=lambda name: (name == SOCKETS, name))
    return (*networks, *(name for name in _ON_NODE if name in names))

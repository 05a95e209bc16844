"""Read from the kernel the TCP ports on which the processes of a node listen.

`ftctl top` uses them to find the page of a node, because the trainer chooses another port if the
configured one is in use.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_LISTENS = "0A"


def ports_below(pid: int) -> list[int]:
    """Return the TCP ports on which a process or its descendants listen, sorted."""
    ports = set[int]()
    for one in _with_children(pid):
        try:
            ports |= _ports(_PROC / str(one))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is another user's
    return sorted(ports)


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    for file in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            children = file.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            yield from _with_children(int(child))


def _ports(process: Path) -> set[int]:
    sockets = {
        found[1]
        for one in (process / "fd").iterdir()
        if (found := re.fullmatch(r"socket:\[([0-9]+)\]", _link(one)))
    }
    ports = set[int]()
    for line in (process / "net" / "tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == _LISTENS and rest[5] in sockets:  # proc_net_tcp(5): the inode
            ports.add(int(local.rpartition(":")[2], 16))
    return ports


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # closed in the meantime

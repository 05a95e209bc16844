"""Prepare a rank to show its stacks and collectives when it no longer responds.

Called by `worker` in the rank; `node.evidence` queries it. C code serves both queries, so they
work while another thread of the rank holds the interpreter lock, but not in a stopped process.
"""

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from finetune_trainer.telemetry.slots import Block, Word

STACKS_SIGNAL = signal.SIGUSR2


def stacks_file(rank: int) -> str:
    """Return the name of the file to which a rank's stacks are appended."""
    return f"rank-{rank}.stacks"


def recorder_socket(rank: int) -> str:
    """Return the name of the socket through which torch reports a rank's collectives."""
    return f"rank-{rank}.recorder"


_SERVERS: list[object] = []  # servers, which warn when they are deleted


class Witness:
    """Resources that a rank holds open for queries."""

    def __init__(self, folder: Path, rank: int, block: Block) -> None:
        """Write the stacks of all threads into the folder of the node's page at each SIGUSR2.

        The folder is in memory, so no disk can delay the rank.

        Raises:
            OSError: There is no room.
        """
        self._folder, self._rank = folder, rank
        self._file: IO[bytes] = (folder / stacks_file(rank)).open("ab")
        faulthandler.register(STACKS_SIGNAL, self._file, all_threads=True)
        # Published last: without the handler, the signal would kill this process.
        block.numbers[Word.WITNESS_PID] = os.getpid()

    def serve_collectives(self) -> None:
        """Serve the flight recorder's contents from a torch thread; torch is imported by now."""
        from torch._C import _distributed_c10d as c10d

        server = getattr(c10d, "_WorkerServer", None)  # not public, so it may disappear
        if server is not None:
            path = self._folder / recorder_socket(self._rank)
            path.unlink(missing_ok=True)  # left by an earlier process
            with _quiet():
                _SERVERS.append(server(str(path)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard stderr during the block: torch warns that its server is up."""
    saved, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(devnull)

"""Makes a rank tell what it does while it can tell nothing itself: stacks and collectives.

Called by `worker` in the rank; `node.evidence` asks. Both answers come from C code, so also while
another thread of the rank holds the interpreter lock. A stopped process gives neither.
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
    """Return the name of the file that a rank's stacks are added to."""
    return f"rank-{rank}.stacks"


def recorder_socket(rank: int) -> str:
    """Return the name of the socket behind which torch tells of a rank's collectives."""
    return f"rank-{rank}.recorder"


_KEPT: list[object] = []  # servers, which complain when they are deleted


class Witness:
    """What a rank keeps open to be asked."""

    def __init__(self, folder: Path, rank: int, block: Block) -> None:
        """Write the stacks of all threads into the folder of the node's page at each SIGUSR2.

        The folder is in memory: no disk can hold up a rank that is asked.

        Raises:
            OSError: there is no room.
        """
        self._folder, self._rank = folder, rank
        self._file: IO[bytes] = (folder / stacks_file(rank)).open("ab")
        faulthandler.register(STACKS_SIGNAL, self._file, all_threads=True)
        block.numbers[Word.WITNESS_PID] = os.getpid()  # not asked before: it would die of it

    def tell_collectives(self) -> None:
        """Let a thread of torch answer what its flight recorder has; torch is imported by now."""
        from torch._C import _distributed_c10d as c10d

        server = getattr(c10d, "_WorkerServer", None)  # no public name, so it may go
        if server is not None:
            path = self._folder / recorder_socket(self._rank)
            path.unlink(missing_ok=True)  # of an earlier process
            with _quiet():
                _KEPT.append(server(str(path)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Throw away what the process writes to stderr meanwhile: torch warns that its server is up."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)

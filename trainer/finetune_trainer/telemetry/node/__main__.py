"""The process: `python -m finetune_trainer.telemetry.node FOLDER FIRST_RANK NUM_RANKS LISTENER`.

It lives as long as its standard input is open: the other end is held by whoever started it, and is
closed by the kernel when that is killed. Signals that ask a process to stop are for the ranks.
"""

import shutil
import signal
import socket
import sys
from pathlib import Path

from finetune_trainer import first_signal
from finetune_trainer.telemetry.node.ranks import NodeRanks
from finetune_trainer.telemetry.node.routes import routes
from finetune_trainer.telemetry.node.server import PageServer


def main() -> None:
    """Serve until whoever started this is gone, and take the folder along."""
    folder, first_rank, num_ranks, listener = sys.argv[1:]
    for number in first_signal.NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    ranks = NodeRanks(Path(folder), range(int(first_rank), int(first_rank) + int(num_ranks)))
    server = PageServer(socket.socket(fileno=int(listener)), routes(ranks))
    sys.stdin.buffer.read()
    server.close()
    shutil.rmtree(folder, ignore_errors=True)  # whoever started this deletes what stays


if __name__ == "__main__":
    main()

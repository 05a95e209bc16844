"""The process: `python -m finetune_trainer.telemetry.node FOLDER FIRST_RANK NUM_RANKS WHAT FD`.

FD is a socket that listens, WHAT is `gpus` where it shall read those, and else `ranks`. It lives as
long as its standard input is open: the other end is held by whoever started it, and is closed by
the kernel when that is killed. Signals that ask a process to stop are for the ranks.
"""

import shutil
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from finetune_trainer import first_signal
from finetune_trainer.telemetry.node.gpus import Gpus
from finetune_trainer.telemetry.node.node_ranks import NodeRanks
from finetune_trainer.telemetry.node.node_watch import read_watch
from finetune_trainer.telemetry.node.routes import routes
from finetune_trainer.telemetry.node.server import PageServer
from finetune_trainer.telemetry.shared import tell_warning


def main() -> None:
    """Serve until whoever started this is gone, and take the folder along."""
    folder, first_rank, num_ranks, what, listener = sys.argv[1:]
    for number in first_signal.NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    ranks = NodeRanks(Path(folder), range(int(first_rank), int(first_rank) + int(num_ranks)))
    gpus = Gpus(partial(_warn, Path(folder))) if what == "gpus" else None
    watch = read_watch(Path(folder), ranks)
    server = PageServer(socket.socket(fileno=int(listener)), routes(ranks, gpus, watch))
    if watch is not None:
        watch.start()
    sys.stdin.buffer.read()
    server.close()
    shutil.rmtree(folder, ignore_errors=True)  # whoever started this deletes what stays


def _warn(folder: Path, sentence: str) -> None:
    try:
        tell_warning(folder, sentence)
    except OSError as error:
        print(f"warning: {sentence} ({folder}: {error.strerror})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Run the page's process: `python -m finetune_trainer.telemetry.node FOLDER FIRST NUM WHAT FD`.

FIRST is the first rank of the node, NUM their number, FD a listening socket; WHAT is `gpus` to
read the GPUs as well, otherwise `ranks`. The process runs while its standard input is open: the
starting process holds the other end, and the kernel closes it when that process is killed.
Signals that request a stop are ignored here, because they are meant for the ranks.
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
from finetune_trainer.telemetry.shared import publish_warning


def main() -> None:
    """Serve until the starting process has ended, then delete the folder."""
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
    shutil.rmtree(folder, ignore_errors=True)  # the starting process deletes the rest


def _warn(folder: Path, sentence: str) -> None:
    try:
        publish_warning(folder, sentence)
    except OSError as error:
        print(f"warning: {sentence} ({folder}: {error.strerror})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

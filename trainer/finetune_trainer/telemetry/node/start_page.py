"""Start and end the page of a node, for the node's supervisor or its first rank without one.

The port is bound here, so that ranks know the page's address before the page's process is ready,
and no other program takes the port meanwhile.
"""

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path

from finetune_trainer.config import ENV_NODE_NAME, TelemetryConfig, TrainConfig
from finetune_trainer.files import remove_tree
from finetune_trainer.telemetry.node.node_watch import ENV_WATCH_SPEED, WATCH_FILE, WatchConfig
from finetune_trainer.telemetry.node.peers import word_of
from finetune_trainer.telemetry.node.process import PageProcess
from finetune_trainer.telemetry.shared import NodePage, publish_warning

_MEMORY = Path("/dev/shm")
_LOOPBACK = "127.0.0.1"
_PORTS_TRIED = 20


def watch_config(
    config: TrainConfig,
    num_nodes: int,
    environ: Mapping[str, str] = os.environ,
    key: bytes | None = None,
) -> WatchConfig:
    """Return the settings with which the page finds ranks that hold the run back.

    With the attempt's key all nodes have the same secret; otherwise rank 0's node sends its own.
    """
    return WatchConfig(
        run_dir=config.run_dir,
        attempt=config.job.attempt,
        node=environ.get(ENV_NODE_NAME) or socket.gethostname(),
        num_nodes=num_nodes,
        hang_seconds=config.control.hang_seconds,
        word=word_of(key) if key is not None else secrets.token_urlsafe(16),
        has_key=key is not None,
        speed=float(environ.get(ENV_WATCH_SPEED, "1")),
    )


@contextmanager
def node_page(
    config: TelemetryConfig,
    first_rank: int,
    num_ranks: int,
    folder: Path | None = None,
    *,
    reads_gpus: bool = False,
    watch: WatchConfig | None = None,
    restarts: bool = True,
) -> Iterator[NodePage]:
    """Serve the page of a node's ranks while the block runs.

    The page's process also ends when this process is killed. If no page can be served, the returned
    page has a warning and no folder; with port 0 there is no page.

    Args:
        config: Host and port of the page.
        first_rank: First rank of the node.
        num_ranks: Number of its ranks.
        folder: Folder in which the ranks leave the page's contents, created if missing; None
            creates a temporary one.
        reads_gpus: Whether the page shows the node's GPUs.
        watch: Settings to find ranks that hold the run back; None to skip the search.
        restarts: Whether a thread restarts the page's process when it ends.
    """
    none = NodePage(first_rank=first_rank)
    page, process = _serve(config, none, num_ranks, folder, reads_gpus=reads_gpus, watch=watch)
    if process is not None and restarts:
        process.restart_on_exit()
    try:
        yield page
    finally:
        if process is not None and page.folder is not None:
            process.end()
            remove_tree(Path(page.folder))


def page_without_supervisor(
    config: TrainConfig, *, rank: int, local_rank: int, local_world_size: int
) -> AbstractContextManager[NodePage]:
    """Return the page of this rank's node if another launcher has started each rank.

    The node's first rank serves it; the others derive the folder from values that all of them know.
    """
    first_rank = rank - local_rank
    folder = _folder_of_siblings(config, first_rank)
    if local_rank == 0:
        return node_page(
            config.telemetry,
            first_rank,
            local_world_size,
            folder,
            reads_gpus=config.reads_gpus,
            watch=watch_config(config, config.world.world_size // local_world_size),
            restarts=False,  # a rank has no thread for restarts
        )
    none = NodePage(first_rank=first_rank)
    if config.telemetry.metrics_port == 0:
        return nullcontext(none)
    try:
        _make(folder)
    except OSError:
        return nullcontext(none)  # the first rank reports the reason
    return nullcontext(none.model_copy(update={"folder": str(folder)}))


def _serve(
    config: TelemetryConfig,
    none: NodePage,
    num_ranks: int,
    folder: Path | None,
    *,
    reads_gpus: bool,
    watch: WatchConfig | None,
) -> tuple[NodePage, PageProcess | None]:
    """Start the process of a page; if that fails, return `none` with the reason."""
    if config.metrics_port == 0:
        return none, None
    listener, warning = _listen(config.metrics_host, config.metrics_port)
    if listener is None:
        return none.model_copy(update={"warning": warning}), None
    try:
        folder = _make(folder)
        if watch is not None:
            (folder / WATCH_FILE).write_text(watch.to_json())
        what = "gpus" if reads_gpus else "ranks"
        words = (str(folder), str(none.first_rank), str(num_ranks), what)
        process = PageProcess(words, listener, partial(_warn, folder))
    except OSError as error:
        listener.close()
        sentence = f"the page of this node cannot be served ({error}); no metrics are served"
        return none.model_copy(update={"warning": sentence}), None
    found = {"folder": str(folder), "url": _url(listener), "warning": warning}
    if watch is not None and none.first_rank == 0:
        found["word"] = "" if watch.has_key else watch.word
    return none.model_copy(update=found), process


def _folder_of_siblings(config: TrainConfig, first_rank: int) -> Path:
    """Return a folder that is unique to the node, the attempt, and torchrun's restart of it."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    known = (config.run_dir, config.job.identity, config.job.attempt, restart, first_rank)
    digest = blake2b(repr((os.getuid(), *known)).encode(), digest_size=8).hexdigest()
    return _folder_in_memory() / f"finetune-node-{digest}"


def _folder_in_memory() -> Path:
    """Return a folder without a disk behind it, or else the folder of temporary files."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _make(folder: Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="finetune-node-", dir=_folder_in_memory()))
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _listen(host: str, port: int) -> tuple[socket.socket | None, str | None]:
    """Listen on `port`, or else on the next free port.

    A monitoring system outside of this machine relies on the number: another port is then a
    warning, and only the next few are tried.
    """
    is_local = host == _LOOPBACK
    last = 65536 if is_local else min(port + _PORTS_TRIED, 65536)
    problems: list[OSError] = []
    for candidate in range(port, last):
        try:
            listener = _bind(host, candidate)
        except OSError as error:
            problems.append(error)
            continue
        if is_local or not problems:
            return listener, None
        return listener, (
            f"spec.observability.metricsPort {port} on {host} cannot be used "
            f"({problems[0].strerror}); serving on {candidate} instead"
        )
    return None, (
        f"spec.observability.metricsPort {port} to {last - 1} on {host} cannot be used "
        f"({problems[0].strerror}); no metrics are served; choose another port"
    )


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _url(listener: socket.socket) -> str:
    """Return the address of the metrics for this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/metrics"


def _warn(folder: Path, sentence: str) -> None:
    with suppress(OSError):  # no room, so the page does not work either
        publish_warning(folder, sentence)

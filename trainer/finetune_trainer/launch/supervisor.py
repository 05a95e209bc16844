"""The main process of a node: starts its ranks, passes signals on, and has the last word.

Called by `__main__`. It trains nothing and opens no device. Ranks are never restarted in place:
the operator starts the next attempt when every process of this one is gone.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from finetune_trainer.config import (
    ENV_NODE_RANK,
    ENV_RDZV_ENDPOINT,
    ENV_TERMINATION_PATH,
    ExitCode,
    Termination,
    TrainConfig,
)
from finetune_trainer.control import StopSignal, Verdict, guard
from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.launch.last_words import (
    agree,
    preempted_before_training,
    with_progress,
    write_termination,
)
from finetune_trainer.launch.oom import count_oom_kills
from finetune_trainer.launch.report import (
    DEFAULT_ENTRY,
    ENV_REPORT_DIR,
    ENV_STARTED,
    ENV_SUPERVISOR_PID,
)
from finetune_trainer.launch.watch import Watch

NODE_ZERO_TIMEOUT_SECONDS = 600.0
_SECONDS_BETWEEN_TRIES = 0.2


@dataclass(frozen=True)
class Node:
    """This node's place, from its environment.

    Attributes:
        port: of node 0's store; 0 on a single node, which picks a free one.
    """

    rank: int
    host: str
    port: int


class Supervisor:
    """One attempt on one node."""

    def __init__(
        self,
        config: TrainConfig,
        config_path: Path,
        *,
        entry: str = DEFAULT_ENTRY,
        environ: MutableMapping[str, str] = os.environ,
        oom_kills: Callable[[], int] = count_oom_kills,
    ) -> None:
        """Prepare; nothing starts before `run`.

        Args:
            config: what `config_path` holds.
            config_path: given to the ranks.
            entry: `module:function` that does a rank's work.
            environ: read for the node's place; completed for the ranks, which inherit it.
            oom_kills: counts the out-of-memory kills on this node so far.
        """
        self._config = config
        self._config_path = config_path
        self._entry = entry
        self._environ = environ
        self._oom_kills = oom_kills
        self._stop = StopSignal()

    def run(self) -> Termination:
        """Run the attempt to its end, write the last words, and return them."""
        self._stop.install()
        with TemporaryDirectory(prefix="finetune-ranks-") as folder:
            termination, _ = guard(lambda: self._supervise(Path(folder)), on_error=_explain)
        config = self._config
        termination = with_progress(termination, Path(config.run_dir), config.job.attempt)
        say_last_words(termination, config.termination_path, self._environ)
        return termination

    def _supervise(self, folder: Path) -> Termination:
        node = read_node(self._config, self._environ)
        if node.rank > 0:
            wait_for_node_zero(node, should_stop=lambda: self._stop.requested)
        if self._stop.requested:
            return preempted_before_training(self._stop.reason)
        self._prepare_environment(folder)
        oom_kills_before = self._oom_kills()
        watch = Watch(folder, self._stop, self._config.termination_grace_seconds)
        self._launch(node, folder, watch)
        return agree(
            watch.exits,
            stop_reason=self._stop.reason,
            is_out_of_memory=self._oom_kills() > oom_kills_before,
        )

    def _launch(self, node: Node, folder: Path, watch: Watch) -> None:
        from finetune_trainer.launch.agent import NodeSpec, RankAgent  # imports torch: a second

        config = self._config
        spec = NodeSpec(
            run_id=f"{config.job.uid}-{config.job.attempt}",
            node_rank=node.rank,
            nnodes=config.world.nnodes,
            nproc_per_node=config.world.nproc_per_node,
            host=node.host,
            port=node.port,
            arguments=("-m", "finetune_trainer.launch.worker", str(self._config_path), self._entry),
            log_dir=folder / "agent",
        )
        RankAgent(spec, watch.until_all_ended).run()

    def _prepare_environment(self, folder: Path) -> None:
        """Set what the ranks read before they read the configuration."""
        self._environ.update(
            {
                # torch and the BLAS libraries read it when they are loaded, so it cannot wait.
                "OMP_NUM_THREADS": str(self._config.world.threads_per_process),
                "TOKENIZERS_PARALLELISM": "false",
                ENV_REPORT_DIR: str(folder),
                ENV_STARTED: str(psutil.Process().create_time()),
                ENV_SUPERVISOR_PID: str(os.getpid()),
            }
        )


def read_node(config: TrainConfig, environ: Mapping[str, str]) -> Node:
    """Return this node's place.

    Raises:
        ConfigError: a variable is missing or makes no sense.
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


def wait_for_node_zero(
    node: Node,
    *,
    should_stop: Callable[[], bool],
    timeout_seconds: float = NODE_ZERO_TIMEOUT_SECONDS,
) -> None:
    """Return when node 0 accepts connections, or `should_stop`.

    Only a connection counts: a name that resolves may still point nowhere, and one that does not
    may do so in a moment.

    Raises:
        TrainerError: nobody answered in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while not should_stop():
        try:
            socket.create_connection((node.host, node.port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TrainerError(
                    f"node 0 does not answer at {node.host}:{node.port} after "
                    f"{timeout_seconds:.0f} s ({error}); look at whether it was started, and "
                    "whether a network policy is in the way"
                ) from error
        time.sleep(_SECONDS_BETWEEN_TRIES)


def say_last_words(
    termination: Termination, default_path: str | None, environ: Mapping[str, str] = os.environ
) -> None:
    """Write the termination file, and the sentence to stderr.

    A file that cannot be written changes nothing about how the attempt ended.

    Args:
        termination: what to say.
        default_path: where to, unless the environment names another file; None writes none.
        environ: may hold that other path.
    """
    print(f"{termination.failure_class}: {termination.message}", file=sys.stderr, flush=True)
    path = environ.get(ENV_TERMINATION_PATH) or default_path
    if path is None:
        return
    try:
        write_termination(Path(path), termination)
    except OSError as error:
        print(
            f"warning: terminationPath {path} cannot be written ({error.strerror})",
            file=sys.stderr,
            flush=True,
        )


def _explain(verdict: Verdict, trace: str) -> None:
    if verdict.exit_code == ExitCode.ERROR:
        print(trace, file=sys.stderr, flush=True)

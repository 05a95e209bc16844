"""Main process of a node: start its ranks and its page, forward signals, report the end.

Called by `main`. It does not train, opens no device and never imports torch. After a fault it may
restart the ranks of a single node; otherwise the operator starts the next attempt when every
process of this one is gone.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from finetune_trainer.config import (
    ENV_TERMINATION_PATH,
    ENV_VOLUMES,
    ExitCode,
    FailureClass,
    Termination,
    TrainConfig,
)
from finetune_trainer.control import StopSignal, Verdict, guard
from finetune_trainer.launch.oom import count_oom_kills
from finetune_trainer.launch.rank_ends import RankWatch
from finetune_trainer.launch.rank_report import (
    DEFAULT_ENTRY,
    ENV_REPORT_DIR,
    ENV_STARTED,
    ENV_SUPERVISOR_PID,
)
from finetune_trainer.launch.start_ranks import Node, read_node, start_ranks
from finetune_trainer.launch.store_port import open_store_port
from finetune_trainer.launch.termination_message import (
    choose_termination,
    preempted_before_training,
    with_published,
    write_termination,
)
from finetune_trainer.launch.trackers.process import TrackerProcess
from finetune_trainer.rendezvous import rendezvous_limit
from finetune_trainer.telemetry.node.start_page import node_page, watch_config
from finetune_trainer.telemetry.shared import ENV_NODE_PAGE, NodePage


class Supervisor:
    """Runs an attempt on this node."""

    def __init__(
        self,
        config: TrainConfig,
        config_path: Path,
        *,
        entry: str = DEFAULT_ENTRY,
        environ: Mapping[str, str] = os.environ,
        tracker_variables: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> None:
        """Prepare to run `config`.

        A request to `stop` is forwarded to the ranks as SIGTERM.

        Args:
            config: The run.
            config_path: File from which the ranks read the same configuration.
            entry: `module:function` that does a rank's work.
            environ: Environment with this node's place, which the ranks inherit.
            tracker_variables: Additional variables for the process of the trackers.
            key: Key of the attempt, which no other process of this node gets.
        """
        self._config = config
        self._config_path = config_path
        self._entry = entry
        self._environ = environ
        self._tracker_variables = tracker_variables or {}
        self._key = key
        self._trackers: TrackerProcess | None = None
        self.stop = StopSignal()

    def run(self) -> Termination:
        """Run the attempt to its end, write its termination message and return it."""
        self.stop.install()
        with TemporaryDirectory(prefix="finetune-ranks-") as folder:
            termination, _ = guard(lambda: self._supervise(Path(folder)), on_error=print_traceback)
        config = self._config
        termination = with_published(termination, Path(config.run_dir), config.job.attempt)
        write_termination_message(termination, config.termination_path)
        if self._trackers is not None:
            self._trackers.end(termination.exit_code)
        return termination

    def _supervise(self, folder: Path) -> Termination:
        node = read_node(self._config, self._environ, self._key)
        num_ranks = self._config.world.nproc_per_node
        watch = watch_config(self._config, self._config.world.nnodes, self._environ, node.key)
        with node_page(
            self._config.telemetry,
            node.rank * num_ranks,
            num_ranks,
            reads_gpus=self._config.reads_gpus,
            watch=watch,
        ) as page:
            if node.rank == 0:
                environ = {**self._environ, **self._tracker_variables}
                self._trackers = TrackerProcess.start(
                    self._config, self._config_path, page.folder, environ
                )
            return self._run_attempt(node, page, folder)

    def _run_attempt(self, node: Node, page: NodePage, folder: Path) -> Termination:
        """Run the ranks; after a fault, rerun them as often as configured."""
        allowed, restart = self._config.world.restarts_in_place, 0
        while True:
            if self.stop.requested:
                return preempted_before_training(self.stop.reason)
            reports = folder / str(restart)
            reports.mkdir()
            termination = self._run_ranks(node, page, reports, restart)
            if restart == allowed or self.stop.requested or not _may_restart(termination):
                return termination
            restart += 1
            print(
                f"{termination.failure_class}: {termination.message}; restarting all ranks of this "
                f"node ({restart} of {allowed})",
                file=sys.stderr,
                flush=True,
            )

    def _run_ranks(self, node: Node, page: NodePage, reports: Path, restart: int) -> Termination:
        """Start the ranks and return their termination once all have ended."""
        config = self._config
        started = time.time() if restart else psutil.Process().create_time()
        environ = {
            **self._environ,
            # torch and the BLAS libraries read this variable when they are loaded.
            "OMP_NUM_THREADS": str(config.world.threads_per_process),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONSAFEPATH": "1",  # for processes that torch and the ranks start
            ENV_REPORT_DIR: str(reports),
            ENV_STARTED: str(started),
            ENV_SUPERVISOR_PID: str(os.getpid()),
            ENV_NODE_PAGE: page.to_json(),
        }
        path = str(self._config_path.absolute())
        arguments = ("-m", "finetune_trainer.launch.worker", path, self._entry)
        oom_kills_before = count_oom_kills()
        watch = RankWatch(reports, self.stop, config.termination_grace_seconds)
        limit = rendezvous_limit(self._environ)
        with open_store_port(node, lambda: self.stop.requested, limit) as store:
            processes = start_ranks(
                config,
                node,
                store,
                arguments,
                environ,
                restart=restart,
                current_folder=self._folder(reports),
            )
            watch.until_all_ended(processes)
        return choose_termination(
            watch.exits,
            stop_reason=self.stop.reason,
            is_out_of_memory=count_oom_kills() > oom_kills_before,
        )

    def _folder(self, reports: Path) -> Path | None:
        """Return an empty folder for the ranks of a pod, so that no library finds a file by name.

        A user who starts the trainer by hand may use relative paths, so it stays in its folder.
        """
        if ENV_VOLUMES not in self._environ:
            return None
        folder = reports.with_name("empty")
        folder.mkdir(exist_ok=True)
        return folder


def _may_restart(termination: Termination) -> bool:
    """Whether a retry can help; an out-of-memory error would recur."""
    is_fault = termination.exit_code in (ExitCode.ERROR, ExitCode.KILLED)
    return is_fault and termination.failure_class is not FailureClass.OUT_OF_MEMORY


def write_termination_message(termination: Termination, default_path: str | None) -> None:
    """Print the message to stderr and write the termination to a file.

    The environment names the file; otherwise it is `default_path`.

    A file that cannot be written does not change how the attempt ended.
    """
    print(f"{termination.failure_class}: {termination.message}", file=sys.stderr, flush=True)
    path = os.environ.get(ENV_TERMINATION_PATH) or default_path
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


def print_traceback(verdict: Verdict, trace: str) -> None:
    """Print the traceback of an error without a message of its own; for `guard`."""
    if verdict.exit_code == ExitCode.ERROR:
        print(trace, file=sys.stderr, flush=True)

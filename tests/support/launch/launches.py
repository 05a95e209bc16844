"""Start the trainer's main process on stand-in ranks, and see what it leaves behind."""

import errno
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import finetune_trainer
from finetune_trainer.config import Termination, TrainConfig
from support.launch.journals import journal_in

_TESTS = Path(__file__).parents[2]
_TRAINER = Path(finetune_trainer.__file__).parents[1]  # of these tests, not an installed one
MAIN = Path(__file__).with_name("stand_in_main.py")


def train_config(folder: Path, **changes: Any) -> TrainConfig:
    """Return a valid configuration of two processes that keeps everything below `folder`.

    Values of `changes` replace or, for mappings, complete values of the same (snake case) name.
    """
    values: dict[str, Any] = {
        "job": {"name": "tiny", "uid": "u-1"},
        "world": {"nproc_per_node": 2},
        "model": {"path": str(folder / "model")},
        "data": {"train": {"path": str(folder / "train.jsonl")}, "cache_dir": str(folder / "c")},
        "method": {"type": "full"},
        "training": {"global_batch_size": 4, "max_steps": 10, "learning_rate": 1e-3},
        "checkpoint": {"dir": str(folder / "checkpoints")},
        "output": {"dir": str(folder / "output"), "format": "merged"},
        "telemetry": {"metrics_port": 0},
        "run_dir": str(folder / "run"),
        "termination_path": str(folder / "termination.json"),
    }
    for name, value in changes.items():
        known = values.get(name)
        values[name] = {**known, **value} if isinstance(known, dict) else value
    return TrainConfig.model_validate(values)


def clean_environment(**changes: str) -> dict[str, str]:
    """Return an environment without any launcher's variables, in which stand-ins are found."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {
        **keep,
        "PYTHONPATH": f"{_TESTS}{os.pathsep}{_TRAINER}",
        "PYTHONWARNINGS": "error",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **changes,
    }


@dataclass
class Launch:
    """A started main process and the folder it works in."""

    process: "subprocess.Popen[str]"
    config: TrainConfig

    def wait(self, timeout: float = 150) -> int:
        """Return the exit code; its standard error is then in `stderr`."""
        _, self.stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode

    @property
    def termination(self) -> Termination:
        """The termination message it wrote."""
        return Termination.read(Path(self.config.termination_path))

    def wait_for_step(self, rank: int) -> int:
        """Return the process id of a rank, once it has finished a step."""
        path = Path(self.config.run_dir) / f"pid-{rank}"
        until(lambda: path.exists() and path.read_text() != "")
        return int(path.read_text())

    def pids_of_ranks(self) -> list[int]:
        """Return the process ids of a single node's ranks, once each has finished a step."""
        return [self.wait_for_step(rank) for rank in range(self.config.world.nproc_per_node)]

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Return the lines of a rank's journal."""
        return journal_in(Path(self.config.run_dir), rank)


def launch(
    config: TrainConfig,
    entry: str,
    environ: Mapping[str, str] | None = None,
    run_by: Sequence[str] = (),
) -> Launch:
    """Start the main process of a node with the named stand-in from `rank_entries`.

    `run_by` is the start of a command that is to run it.
    """
    path = Path(config.termination_path).parent / "config.json"
    path.write_text(config.to_json())
    process = subprocess.Popen(
        [*run_by, sys.executable, str(MAIN), str(path), entry],
        env=clean_environment(**(environ or {})),
        stderr=subprocess.PIPE,
        text=True,
    )
    return Launch(process, config)


def free_port() -> int:
    """Return a port without a listener, outside of the range that the kernel assigns.

    It is bound seconds later, by a process that imports torch first.
    """
    while True:
        port = 10_000 + secrets.randbelow(10_000)  # the kernel's begin at 32768
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port


def until(condition: Callable[[], bool], timeout: float = 150) -> None:
    """Return when the condition holds.

    Raises:
        TimeoutError: it did not in time.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true in time")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    """Return the letter of a process's state in /proc; X if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"

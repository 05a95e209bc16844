"""Attempts that are frozen, woken and killed with all of their processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from finetune_trainer.config import Termination, TrainConfig
from finetune_trainer.data.sequences import prepare
from finetune_trainer.rank import run
from support.launch.forked_ranks import Ranks
from support.launch.launches import clean_environment, is_alive, state_of

IMPATIENT_SECONDS = 2.0  # of `start_forked`


@dataclass
class Attempt:
    """The processes of an attempt: a main process with all that it starts, or forked ranks.

    Attributes:
        roots: Ids of the main process, or of the ranks.
        code: Returns the exit code of the main process or of rank 0; None before its end.
        termination: File of the termination message.
        members: Ids of all processes when the attempt was frozen.
    """

    roots: tuple[int, ...]
    code: Callable[[], int | None]
    termination: Path
    members: set[int] = field(default_factory=set)

    @property
    def is_gone(self) -> bool:
        """Whether no process of the attempt is left."""
        return self.code() is not None and not any(map(is_alive, {*self.roots, *self.members}))

    def is_stopped(self) -> bool:
        """Whether a process has stopped itself at a failpoint."""
        return any(state_of(pid) == "T" for pid in self._tree())

    def freeze(self) -> None:
        """Stop every process."""
        while new := self._tree() - self.members:
            self.members |= new
            self._send(new, signal.SIGSTOP)

    def wake(self) -> None:
        """Let every process continue."""
        self._send(self.members, signal.SIGCONT)

    def kill(self) -> None:
        """Kill every process."""
        self._send(self._tree() | self.members, signal.SIGKILL)

    def _tree(self) -> set[int]:
        found = set()
        for root in filter(is_alive, self.roots):
            try:
                below = psutil.Process(root).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
            found |= {root, *(one.pid for one in below)}
        return found

    def _send(self, pids: set[int], number: signal.Signals) -> None:
        for pid in filter(is_alive, pids):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it ended between the two calls


Start = Callable[[TrainConfig, Mapping[str, str]], Attempt]


def start_main(config: TrainConfig, environ: Mapping[str, str]) -> Attempt:
    """Start the main process of a node, which starts the ranks."""
    folder = Path(config.termination_path).parent
    (folder / "config.json").write_text(config.to_json())
    with (folder / "stderr.txt").open("ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune_trainer", str(folder / "config.json")],
            env=clean_environment(PYTHONWARNINGS="default", HF_HUB_OFFLINE="1") | dict(environ),
            stdout=stderr,
            stderr=stderr,
        )
    return Attempt((process.pid,), process.poll, Path(config.termination_path))


def start_forked(config: TrainConfig, environ: Mapping[str, str]) -> Attempt:
    """Fork the ranks of an impatient attempt from a process that has imported torch."""
    ranks = Ranks(config, environ, entry=f"{__name__}:run_impatiently")
    pids = tuple(one.pid for one in ranks.processes if one.pid is not None)
    termination = Path(f"{config.termination_path}.0")
    return Attempt(pids, lambda: ranks.processes[0].exitcode, termination)


def run_impatiently(*arguments: Any) -> Termination:
    """Do the work of a rank, with less patience for the lock of the token cache."""
    # A configuration cannot change it, because a job needs no other value.
    assert prepare.__kwdefaults__ is not None
    prepare.__kwdefaults__["patience_seconds"] = IMPATIENT_SECONDS
    return run(*arguments)

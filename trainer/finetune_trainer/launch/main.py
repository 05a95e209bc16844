"""Run the main process of a node or one rank: the entry of `python -m finetune_trainer CONFIG`.

Started once per node, it supervises the node's ranks. Started once per process by another launcher
(torchrun, `accelerate launch`, mpirun, Azure ML), it is the rank that the environment names. On the
nodes of an Azure ML job, `launch.azureml` supervises instead.
"""

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import psutil
from pydantic import ValidationError

from finetune_trainer.config import (
    ENV_RDZV_KEY,
    ENV_TERMINATION_PATH,
    ExitCode,
    FailureClass,
    Termination,
    TrainConfig,
)
from finetune_trainer.control import leave
from finetune_trainer.launch.problems import sentences
from finetune_trainer.launch.rank_report import DEFAULT_ENTRY, RankReport
from finetune_trainer.launch.supervisor import Supervisor, write_termination_message
from finetune_trainer.launch.trackers.process import take_variables
from finetune_trainer.launchers import has_launcher
from finetune_trainer.unused_packages import hide_unused


def main(arguments: Sequence[str], *, entry: str = DEFAULT_ENTRY) -> NoReturn:
    """Run, and end the process with the exit code of the attempt.

    Args:
        arguments: The path of the configuration.
        entry: `module:function` that does a rank's work.
    """
    if len(arguments) != 1:
        print("usage: python -m finetune_trainer CONFIG", file=sys.stderr)
        leave(ExitCode.CONFIG)
    path = Path(arguments[0])
    key = os.environ.pop(ENV_RDZV_KEY, None)  # no other process inherits it
    try:
        config = TrainConfig.read(path)
    except (OSError, ValidationError) as error:
        leave(_refuse(path, error))
    if has_launcher(os.environ):
        leave(_run_as_rank(config, entry))
    variables = take_variables(os.environ)
    supervisor = Supervisor(config, path, entry=entry, tracker_variables=variables, key=key)
    leave(supervisor.run().exit_code)


def _run_as_rank(config: TrainConfig, entry: str) -> int:
    """Do one rank's work; without our supervisor, the ranks write the termination message.

    Rank 0 reports for all ranks, unless another rank is the cause, because rank 0 then only detects
    the loss of a peer. If rank 0 reports first, the rank that is the cause overwrites its message.
    """
    from finetune_trainer.launch.worker import run_rank  # slow to import, not for supervisors

    started = psutil.Process().create_time()  # about the same for all ranks of a launcher
    path = Path(os.environ.get(ENV_TERMINATION_PATH) or config.termination_path)

    def report_end(report: RankReport) -> None:
        with _locked(path):
            written = _written(path, since=started)
            is_cause = report.termination.rank is not None
            is_first = written is None and report.rank == 0
            if is_first or (is_cause and (written is None or written.rank is None)):
                write_termination_message(report.termination, config.termination_path)
                return
        print(f"rank {report.rank}: {report.termination.message}", file=sys.stderr)

    hide_unused(config)
    report = run_rank(config, entry, report_end=report_end)
    report_end(report)
    return report.termination.exit_code


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let only one rank of this node at a time read and write the file."""
    with ExitStack() as at_end:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(path.parent, os.O_RDONLY)  # the file itself gets replaced
            at_end.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            problem = f"{path.parent} cannot be locked ({error.strerror})"
            print(f"warning: {problem}; ranks may write {path.name} together", file=sys.stderr)
        yield


def _written(path: Path, since: float) -> Termination | None:
    """Return the message written by a rank of this launch; None if older or missing."""
    try:
        return Termination.read(path) if path.stat().st_mtime >= since else None
    except (OSError, ValidationError):
        return None


def _refuse(path: Path, error: OSError | ValidationError) -> ExitCode:
    problems = _problems(path, error)
    if len(problems) > 1:  # a single problem is in the termination message
        print(*problems, sep="\n", file=sys.stderr)
    termination = Termination(
        failure_class=FailureClass.CONFIG_ERROR,
        exit_code=ExitCode.CONFIG,
        message="; ".join(problems),
    )
    write_termination_message(termination, _termination_path(path))
    return ExitCode.CONFIG


def _problems(path: Path, error: OSError | ValidationError) -> list[str]:
    """Return a sentence for each problem of the configuration file."""
    if isinstance(error, OSError):
        return [f"{path} cannot be read ({error.strerror}); pass the path of a TrainConfig file"]
    return sentences(str(path), error)


def _termination_path(path: Path) -> str | None:
    """Return `terminationPath` of a configuration that may be invalid; None without a path."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None  # already reported as the reason why the configuration is invalid
    found = values.get("terminationPath") if isinstance(values, dict) else None
    return found if isinstance(found, str) else None

"""What `python -m finetune_trainer CONFIG` does: be the main process of a node, or one rank of it.

Started once per node it supervises the node's ranks. Started once per process by another launcher
(torchrun, `accelerate launch`, mpirun, Azure ML) it is the rank that the environment names;
once per node of an Azure ML job, `launch.azureml` supervises.
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
from finetune_trainer.launchers import launched_by_another


def main(arguments: Sequence[str], *, entry: str = DEFAULT_ENTRY) -> NoReturn:
    """Run, and end the process with the exit code of the attempt.

    Args:
        arguments: the path of the configuration.
        entry: `module:function` that does a rank's work.
    """
    if len(arguments) != 1:
        print("usage: python -m finetune_trainer CONFIG", file=sys.stderr)
        leave(ExitCode.CONFIG)
    path = Path(arguments[0])
    try:
        config = TrainConfig.read(path)
    except (OSError, ValidationError) as error:
        leave(_refuse(path, error))
    if launched_by_another(os.environ):
        leave(_be_a_rank(config, entry))
    leave(Supervisor(config, path, entry=entry).run().exit_code)


def _be_a_rank(config: TrainConfig, entry: str) -> int:
    """Do one rank's work; ranks write the termination message, as there is no supervisor of ours.

    Rank 0 speaks for all, unless another is to blame: of that, rank 0 only sees that a peer is
    gone. It may see that before the other has spoken, which then has the last word.
    """
    from finetune_trainer.launch.worker import run_rank  # imports what a supervisor has no use for

    started = psutil.Process().create_time()  # about the same for all ranks of a launcher
    path = Path(os.environ.get(ENV_TERMINATION_PATH) or config.termination_path)

    def report_end(report: RankReport) -> None:
        with _alone_beside(path):
            said = _said(path, since=started)
            is_to_blame = report.termination.rank is not None
            has_the_word = said is None and report.rank == 0
            if has_the_word or (is_to_blame and (said is None or said.rank is None)):
                write_termination_message(report.termination, config.termination_path)
                return
        print(f"rank {report.rank}: {report.termination.message}", file=sys.stderr)

    report = run_rank(config, entry, report_end=report_end)
    report_end(report)
    return report.termination.exit_code


@contextmanager
def _alone_beside(path: Path) -> Iterator[None]:
    """Let one rank of this node after the other look at the file and write it."""
    with ExitStack() as at_end:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(path.parent, os.O_RDONLY)  # the file is replaced, and a lock with it
            at_end.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            problem = f"{path.parent} cannot be locked ({error.strerror})"
            print(f"warning: {problem}; ranks may write {path.name} at once", file=sys.stderr)
        yield


def _said(path: Path, since: float) -> Termination | None:
    """Return what a rank of this launch has written; None for what is older, or no message."""
    try:
        return Termination.read(path) if path.stat().st_mtime >= since else None
    except (OSError, ValidationError):
        return None


def _refuse(path: Path, error: OSError | ValidationError) -> ExitCode:
    problems = _problems(path, error)
    if len(problems) > 1:  # one alone is in the termination message
        print(*problems, sep="\n", file=sys.stderr)
    termination = Termination(
        failure_class=FailureClass.CONFIG_ERROR,
        exit_code=ExitCode.CONFIG,
        message="; ".join(problems),
    )
    write_termination_message(termination, _termination_path(path))
    return ExitCode.CONFIG


def _problems(path: Path, error: OSError | ValidationError) -> list[str]:
    """Return a sentence for each thing that is wrong with the configuration file."""
    if isinstance(error, OSError):
        return [f"{path} cannot be read ({error.strerror}); pass the path of a TrainConfig file"]
    return sentences(str(path), error)


def _termination_path(path: Path) -> str | None:
    """Return where the unusable configuration wants its termination message, if it says so."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None  # said already, as the reason why the configuration is unusable
    found = values.get("terminationPath") if isinstance(values, dict) else None
    return found if isinstance(found, str) else None

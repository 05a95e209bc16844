"""Run one node of an Azure ML job, from its command line to its exit code.

Azure ML starts it once on each node, and may start the same run again on another node after it has
removed one.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from pydantic import ValidationError

from finetune_trainer.config import (
    ENV_NODE_RANK,
    ENV_TRAIN_CONFIG,
    ENV_VOLUMES,
    Termination,
    TrainConfig,
    unpack,
)
from finetune_trainer.control import StopSignal, guard, leave
from finetune_trainer.errors import ConfigError
from finetune_trainer.launch.azureml.mlflow_run import MLflowRun, is_run_of_azureml
from finetune_trainer.launch.azureml.mounts import SCRATCH, read_mounts, resolve_mounts
from finetune_trainer.launch.azureml.node import environment_of_supervisor
from finetune_trainer.launch.azureml.reporter import Reporter
from finetune_trainer.launch.problems import sentences
from finetune_trainer.launch.rank_report import DEFAULT_ENTRY
from finetune_trainer.launch.supervisor import (
    Supervisor,
    print_traceback,
    write_termination_message,
)
from finetune_trainer.launch.termination_message import message_text


def main(arguments: Sequence[str], *, entry: str = DEFAULT_ENTRY) -> NoReturn:
    """Run this node, print its termination message as the last line, and end the process.

    Args:
        arguments: NAME=PATH for each mount that the configuration names.
        entry: `module:function` that does a rank's work.
    """
    with ExitStack() as at_end:
        termination, refusal = guard(
            lambda: _run(arguments, os.environ, entry, at_end), on_error=print_traceback
        )
        if refusal is not None:  # otherwise the supervisor has written it
            write_termination_message(termination, None)
        # The log is a node's only output, and a killed rank may have left an incomplete line in it.
        sys.stdout.buffer.write(f"\n{message_text(termination)}".encode())
        sys.stdout.flush()
    leave(termination.exit_code)


def _run(
    arguments: Sequence[str], environ: Mapping[str, str], entry: str, at_end: ExitStack
) -> Termination:
    """Run the supervisor; `at_end` receives callbacks that may wait until the end."""
    # Files that cannot be deleted disappear with the container.
    with TemporaryDirectory(prefix="finetune-", ignore_cleanup_errors=True) as scratch:
        mounts = read_mounts([f"{SCRATCH}={scratch}", *arguments])
        # Azure ML does not number the starts of a run, so every start resumes from the run's own
        # checkpoints.
        config = resolve_mounts(_read_config(environ), mounts).continued()
        environ = environment_of_supervisor(environ, config.world.nnodes)
        environ |= {ENV_VOLUMES: ":".join(mounts.values())}
        path = Path(scratch) / "config.json"
        path.write_text(config.to_json(), encoding="utf-8")
        supervisor = Supervisor(config, path, entry=entry, environ=environ)
        with _reporting(config, environ, supervisor.stop, at_end):
            return supervisor.run()


def _reporting(
    config: TrainConfig, environ: Mapping[str, str], stop: StopSignal, at_end: ExitStack
) -> AbstractContextManager[None]:
    """Return the reporter, a context manager, on node 0 of an Azure ML run."""
    if environ.get(ENV_NODE_RANK, "0") != "0" or not is_run_of_azureml(environ):
        return nullcontext()
    reporter = Reporter(config, stop, lambda: MLflowRun(environ))
    at_end.callback(reporter.wait)
    return reporter


def _read_config(environ: Mapping[str, str]) -> TrainConfig:
    remedy = "submit the job as ftctl render prints it"
    text = environ.get(ENV_TRAIN_CONFIG)
    if text is None:
        raise ConfigError(f"{ENV_TRAIN_CONFIG} is not set; {remedy}")
    try:
        return unpack(text)
    except ValidationError as error:
        raise ConfigError("; ".join(sentences(ENV_TRAIN_CONFIG, error))) from error
    except ValueError as error:
        raise ConfigError(f"{ENV_TRAIN_CONFIG} cannot be read: {error}; {remedy}") from error

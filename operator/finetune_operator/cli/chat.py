"""`ftctl chat`: converse with the base model and the trained one.

The models run in a process of the trainer, which owns the terminal meanwhile: it reads questions,
prints responses and handles Ctrl-C. `ftctl` finds the models, and reports how that process ended.
"""

import os
import signal
import subprocess
import sys
import tempfile
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from finetune_operator.backends.local.environment import without_current_folder
from finetune_operator.cli.chat_models import ChatModels, find_models
from finetune_operator.cli.conclusion import EXIT_FAILED, EXIT_STOPPED
from finetune_operator.cli.output import EXIT_UNREAD
from finetune_operator.cli.run_directories import shown_path
from finetune_operator.errors import FineTuneError
from finetune_trainer.config import ChatConfig

CHAT_COMMAND = (sys.executable, "-P", "-m", "finetune_trainer.chat")
# Threads that spin while they wait cost most of the time on a machine with other work: measured
# on two cores, 24 tokens took 82 s, and 3 s with threads that sleep.
_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
_LIBRARIES = ("torch", "transformers", "peft", "safetensors")


class Only(StrEnum):
    """The only model that responds."""

    BASE = "base"
    TRAINED = "trained"


def chat(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|NAME|FOLDER",
            help="Manifest or name of a finished job, its run directory, or an exported model.",
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Ask this and exit; repeatable."),
    ] = None,
    only: Annotated[Only | None, typer.Option(help="The only model that responds.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Largest number of tokens of a response.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most probable token each time.")
    ] = 0.0,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System turn of each conversation.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Namespace of a job in a cluster.")
    ] = None,
) -> None:
    """Converse with the base model and the trained one; each continues its own history.

    Ctrl-C ends a response, Ctrl-C twice or Ctrl-D the program. If the input is not a terminal, each
    line is a question. The model must be on this machine: for a job of a cluster, the commands that
    copy it are printed.

    Exit codes: 0 the end of the questions, 1 refused or failed, 2 wrong usage, 130 Ctrl-C, 141 the
    reader of the output has closed it.
    """
    if any(not one.strip() for one in prompt or ()):
        raise typer.BadParameter("--prompt is empty")
    models = find_models(target, namespace)
    _check_base(models, only)
    for module in _LIBRARIES:
        if find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
    print(f"loading {shown_path(models.trained)}", file=sys.stderr, flush=True)
    if models.base is None and only is None:
        alone = "the folder does not record its base model, so only the trained model responds"
        print(alone, file=sys.stderr, flush=True)
    config = ChatConfig(
        trained=str(models.trained),
        base=models.base,
        prompts=tuple(prompt or ()),
        only=only.value if only else None,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        system=system,
        parent_pid=os.getpid(),
    )
    _conclude(_run(config))


def _check_base(models: ChatModels, only: Only | None) -> None:
    """Refuse a missing base model before the libraries are loaded.

    Raises:
        FineTuneError: the base is needed, and not known or not there.
    """
    if models.base is None:
        if only is Only.BASE:
            raise FineTuneError(
                f"{models.trained} does not record its base model; name the manifest or the job"
            )
        return
    base = Path(models.base.path)
    if not base.is_absolute() or base.is_dir() or (only is Only.TRAINED and not models.is_adapter):
        return
    message = f"the base model {base} is missing; {models.remedy}"
    if not models.is_adapter:
        message += "; --only trained needs no base"
    raise FineTuneError(message)


def _run(config: ChatConfig) -> int:
    """Run the process of the models with the terminal of this one; return its exit code.

    Ctrl-C goes to both processes. It is blocked until the new process can handle it, and ignored
    here.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chat.json"
        path.write_text(config.to_json(), encoding="utf-8")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process = subprocess.Popen(
            [*CHAT_COMMAND, str(path)],
            stdin=0,
            stdout=1,
            stderr=2,
            env=without_current_folder({**_VARIABLES, **os.environ}),
        )
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return process.wait()


def _conclude(code: int) -> None:
    """Exit as the process of the models did; it has printed its errors itself.

    Raises:
        FineTuneError: a signal ended the process.
        typer.Exit: the process did not end normally.
    """
    if code == -signal.SIGKILL:
        raise FineTuneError(
            "the process of the models was killed, most likely because memory is full; end other "
            "programs, or use a machine with more memory"
        )
    if code < 0 and -code != signal.SIGINT:
        raise FineTuneError(f"the process of the models ended by {signal.Signals(-code).name}")
    if code:
        known = {-signal.SIGINT: EXIT_STOPPED, EXIT_STOPPED: EXIT_STOPPED, EXIT_UNREAD: EXIT_UNREAD}
        raise typer.Exit(known.get(code, EXIT_FAILED))

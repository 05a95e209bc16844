"""Print the end of a job that the user followed, and choose the exit code."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.v1alpha1.lifecycle import OutputFormat
from finetune_operator.backends.local.layout import BACKEND
from finetune_operator.cli.result import Outcome, print_outcome
from finetune_operator.cli.target import Target
from finetune_operator.cli.view import View, duration
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import ConditionType, find, is_true
from finetune_trainer.config import Progress

_CURVES = "tensorboard"  # the trainer's folder in the run directory
EXIT_FAILED = 1
EXIT_STOPPED = 130  # as a shell reports a program that Ctrl-C ended


def conclude(
    console: Console, target: Target, job: FineTuneJob, last: View, *, seconds: float, again: str
) -> None:
    """Print how a job ended that the user followed.

    Args:
        console: Console to print to.
        target: The job in the manifest.
        job: The job in its present state.
        last: The last view of the job.
        seconds: How long the job was followed.
        again: The command that runs the job again.

    Raises:
        typer.Exit: the job is not Complete; the exit code gives the reason.
    """
    status, took = job.status, f"after {duration(seconds)}"
    if is_true(status, ConditionType.COMPLETE):
        console.print(Text(f"\nComplete {took}\n", style="bold green"))
        if target.job.spec.backend.type == BACKEND:
            chat = f"ftctl chat {shlex.quote(target.manifest.file)}"
            return print_outcome(console, _outcome(target, last.progress), chat=chat)
        return console.print(Text("\n".join(status.artifacts)), soft_wrap=True)
    if is_true(status, ConditionType.FAILED):
        failed = find(status, ConditionType.FAILED)
        console.print(Text(f"\nFailed {took}", style="bold red"))
        console.print(Text(failed.message if failed else ""), soft_wrap=True)
        file = shlex.quote(target.manifest.file)
        console.print(Text(f"\nLogs:   ftctl logs {file}\nAgain:  {again}"))
        raise typer.Exit(EXIT_FAILED)
    attempt = attempts.current(status)
    if attempt and not target.backend.runs_on_this_machine:
        if handle := handle_of(status):
            _print_lines(
                console,
                f"{job.metadata.name} continues: {handle.url or handle.name}",
                "It is restarted after a failure only while ftctl follows it. "
                f"Follow it again: {again}",
                "To stop it with a checkpoint, set spec.suspend: true and run that command again.",
            )
        else:
            _print_lines(
                console,
                f"{job.metadata.name} may be starting: the creation of attempt "
                f"{attempt.number} has no response yet",
                f"Follow it, or check whether it runs: {again}",
                "To stop it, set spec.suspend: true and run that command again.",
            )
        raise typer.Exit(EXIT_STOPPED)
    # The last attempt may have ended before its first step, so use the status, not its progress.
    last_checkpoint = status.checkpoint.last
    if last_checkpoint is not None:
        saved = f"the checkpoint of step {last_checkpoint.step} is saved"
    elif target.job.spec.checkpoint.enabled is False:
        saved = "there is no checkpoint (spec.checkpoint.enabled), so the next run starts at step 0"
    elif target.backend.runs_on_this_machine or not status.attempt:
        saved = "there is no checkpoint yet"
    else:
        saved = "no checkpoint is known"
    console.print(Text(f"\nStopped {took}; {saved}", style="bold yellow"))
    if target.job.spec.suspend:
        console.print(Text("spec.suspend is true; set it to false to resume"))
    console.print(Text(f"Resume with: {again}"))
    raise typer.Exit(EXIT_STOPPED)


def _print_lines(console: Console, first: str, *more: str) -> None:
    """Print lines without wrapping, so that they can be copied."""
    console.print(Text(f"\n{first}", style="bold yellow"), soft_wrap=True)
    for line in more:
        console.print(Text(line), soft_wrap=True)


def _outcome(target: Target, progress: Progress) -> Outcome:
    """Find the exported model: a single format is in the output folder, both are in subfolders."""
    output, spec = target.folders.output, target.job.spec
    if spec.output.format is OutputFormat.BOTH:
        output = output / OutputFormat.ADAPTER.value
    curves = target.folders.run / _CURVES
    found = outcome_of(output, target.base_folder, progress)
    return replace(found, curves=curves if any(curves.glob("events.*")) else None)


def outcome_of(output: Path, base: Path | None, progress: Progress) -> Outcome:
    """Return the outcome of a job that exported to the folder `output`.

    `base` is the local folder of the base model; None if the base is on the hub.
    """
    adapter = output / "adapter_config.json"
    if not adapter.is_file():
        return Outcome(progress, output, is_adapter=False, base=None)
    num_tokens = _num_tokens(json.loads(adapter.read_text()))
    return Outcome(progress, output, is_adapter=True, base=base, num_tokens=num_tokens)


def _num_tokens(settings: Mapping[str, Any]) -> int | None:
    """Return the size of the vocabulary with the tokens that an adapter adds; None without any."""
    found = settings.get("trainable_token_indices")
    if not found:
        return None
    indices = found.values() if isinstance(found, dict) else [found]
    largest: int = max(index for layer in indices for index in layer)
    return largest + 1

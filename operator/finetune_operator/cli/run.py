"""`ftctl run`: validate, plan, submit and follow one job on this machine.

`run_operator` runs the job with the operator that runs in clusters. This module handles signals,
shows progress, and turns the end of the job into an exit code.
"""

import asyncio
import shlex
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.validation import check_start
from finetune_operator.backends.base import Observation
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.cli.conclusion import EXIT_STOPPED, conclude
from finetune_operator.cli.hub import without_silent_hub
from finetune_operator.cli.live import LiveScreen
from finetune_operator.cli.plain import PlainScreen
from finetune_operator.cli.run_ending import LeftRunningError
from finetune_operator.cli.run_opening import open_job
from finetune_operator.cli.run_operator import follow
from finetune_operator.cli.stop_signals import StopSignals
from finetune_operator.cli.target import (
    BackendOption,
    FileArgument,
    ProfileOption,
    Target,
    open_target,
)
from finetune_operator.cli.unread_output import until_unread
from finetune_operator.cli.view import View, duration, view_of
from finetune_operator.kernel.logs import LogFile, set_up
from finetune_operator.kernel.settings import LogFormat, LogLevel


def run(
    file: FileArgument,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run; end an earlier one and move it aside.")
    ] = False,
    backend: BackendOption = None,
    profile: ProfileOption = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines, as if the output were not a terminal.")
    ] = False,
) -> None:
    """Run a job without a cluster and follow it. The same command resumes a stopped job.

    Ctrl-C once stops the job with a checkpoint, twice kills it. A job of a service, such as
    Azure ML, continues there; the same command follows it again.

    Exit codes: 0 Complete, 1 Failed or refused, 2 wrong usage, 130 stopped before the end, 141 the
    reader of the output has closed it: the job continues.
    """
    start = time.monotonic()
    target = without_silent_hub(open_target(file, backend, runs_here=True, profile=profile))
    target.refuse(target.backend.check_inputs(target.job))
    if fresh:
        target.refuse_fresh()
    console = Console(highlight=False)
    folders = target.folders
    folder = RunFolder(folders.run, folders.checkpoint, folders.output)
    if not folder.path.exists():
        target.refuse(check_start(target.job))  # with a line number, before a folder is created
    again = f"ftctl run {shlex.quote(target.manifest.file)}"
    if profile is not None:
        again += f" --profile {shlex.quote(str(profile))}"
    with folder:
        job, last = asyncio.run(
            _follow(target, folder, console, again=again, fresh=fresh, plain=plain)
        )
    conclude(console, target, job, last, seconds=time.monotonic() - start, again=again)


async def _follow(
    target: Target, folder: RunFolder, console: Console, *, again: str, fresh: bool, plain: bool
) -> tuple[FineTuneJob, View]:
    """Follow the job on a screen until it ends; return the job and its last view."""
    context = target.context
    stop = StopSignals()

    def report(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    stop.listen()
    if fresh and folder.path.exists():  # the end of its attempt is logged there
        set_up(LogFormat.TEXT, LogLevel.INFO, LogFile(folder.log))
    try:
        opened = await open_job(target.job, folder, context, stop=stop, report=report, fresh=fresh)
    except LeftRunningError as error:
        report(f"{error}\nResume it: {again}\nEnd it and start a new run: {again} --fresh")
        raise typer.Exit(EXIT_STOPPED) from error
    set_up(LogFormat.TEXT, LogLevel.INFO, LogFile(folder.log))
    if opened.note:
        report(opened.note)
    last = view_of(opened.job, None)
    with _screen(console, last, plain=plain) as screen:
        screen.note(_effect_of_ctrl_c(target, opened.job))

        def show(job: FineTuneJob, seen: Observation | None) -> None:
            nonlocal last
            last = view_of(job, seen, last)
            screen.show(last)

        grace = duration(target.job.spec.deadlines.termination_grace_seconds)
        leaving = "leaving it running; ftctl no longer follows it"
        stopping = (
            f"stopping after a checkpoint, within {grace}; Ctrl-C again kills it at once and loses "
            "the steps since the last checkpoint"
        )
        if opened.job.spec.checkpoint.enabled is False:
            stopping = (
                f"stopping without a checkpoint (spec.checkpoint.enabled), within {grace}; Ctrl-C "
                "again kills it at once"
            )
        if not target.backend.runs_on_this_machine:
            stop.listen(lambda: screen.note(leaving))
        else:
            stop.listen(lambda: screen.note("killing it now" if stop.forced.is_set() else stopping))
        work = follow(opened.job, folder, context, on_observation=show, stop=stop, then=opened.then)
        job = await until_unread(work, is_stopping=stop.asked.is_set, name=last.name, again=again)
    return job, last


def _effect_of_ctrl_c(target: Target, job: FineTuneJob) -> str:
    if not target.backend.runs_on_this_machine:
        return "Ctrl-C leaves the job running; the same command follows it again"
    if job.spec.checkpoint.enabled is False:
        return "Ctrl-C stops without a checkpoint (spec.checkpoint.enabled)"
    return "Ctrl-C saves a checkpoint and stops; the same command resumes"


def _screen(console: Console, first: View, *, plain: bool) -> LiveScreen | PlainScreen:
    """Return a screen that redraws itself on a terminal, otherwise a screen that writes lines."""
    if console.is_terminal and not plain:
        return LiveScreen(console, first, time.monotonic)
    return PlainScreen(sys.stdout, first, time.monotonic)

"""`ftctl run`: validate, plan, submit and follow one job on this machine, to its end.

The decisions are those of `reconcile`, which the operator uses in a cluster; this file listens to
signals, shows what happens, and turns the end into an exit code.
"""

import asyncio
import shlex
import signal
import time
from dataclasses import dataclass
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.text import Text

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.validate import check_start
from finetune_operator.backends.base import Observation
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.cli.conclusion import Conclusion
from finetune_operator.cli.screen import make_screen, stopping
from finetune_operator.cli.target import (
    BackendOption,
    FileArgument,
    Target,
    open_target,
)
from finetune_operator.cli.unheard import heard
from finetune_operator.cli.view import View, look
from finetune_operator.reconcile.drive import StopRequest, drive
from finetune_operator.reconcile.opening import open_job


class Screen(Protocol):
    """Where a run is shown: `LiveScreen` on a terminal, `PlainScreen` elsewhere."""

    def show(self, view: View) -> None:
        """Show what is known now."""

    def note(self, sentence: str) -> None:
        """Keep one sentence on the screen."""


def run(
    file: FileArgument,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew; an earlier run is moved aside.")
    ] = False,
    backend: BackendOption = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines, as when the output is no terminal.")
    ] = False,
) -> None:
    """Run a job on this machine and follow it; run again, it goes on where it stopped.

    Ctrl-C once stops it with a checkpoint, twice kills it.

    Exit codes: 0 Complete, 1 Failed or refused, 2 wrong usage, 130 stopped before its end, 141
    nobody reads what is printed: the job goes on.
    """
    start = time.monotonic()
    target = open_target(file, backend, runs_here=True)
    target.refuse(target.backend.check_inputs(target.job))
    if fresh:
        target.refuse_fresh()
    console = Console(highlight=False)
    opening = RunFolder(target.folders.run, target.folders.checkpoint, target.folders.output)
    if not opening.path.exists():
        target.refuse(check_start(target.job))  # with its line, and before a folder is made
    again = f"ftctl run {shlex.quote(str(target.manifest.path))}"
    with opening as store:
        job, last = asyncio.run(
            _follow(target, store, console, again=again, fresh=fresh, plain=plain)
        )
    Conclusion(target, job, last, time.monotonic() - start, again).tell(console)


async def _follow(
    target: Target, store: RunFolder, console: Console, *, again: str, fresh: bool, plain: bool
) -> tuple[FineTuneJob, View]:
    """Drive the job to its end on a screen; return it with the last view of it."""
    opened = await open_job(target.job, target.backend, store, fresh=fresh)
    if opened.note:
        console.print(Text(opened.note))
    first = look(opened.job, None)
    with make_screen(console, first, plain=plain) as screen:
        follower = _Follower(screen, first)
        interrupts = _Interrupts(screen, StopRequest(), target)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupts.hit)
        job = await heard(
            drive(
                opened.job,
                target.backend,
                store,
                on_change=follower.changed,
                stop=interrupts.stop,
            ),
            is_stopping=lambda: interrupts.stop.is_requested,
            name=first.name,
            again=again,
        )
    return job, follower.last


@dataclass
class _Follower:
    """Turns what `drive` tells into views; keeps the last one for the conclusion."""

    screen: Screen
    last: View

    def changed(self, job: FineTuneJob, observation: Observation | None) -> None:
        self.last = look(job, observation, self.last)
        self.screen.show(self.last)


@dataclass
class _Interrupts:
    """The first Ctrl-C (or SIGTERM) asks for a checkpoint and an end, the second one kills."""

    screen: Screen
    stop: StopRequest
    target: Target

    def hit(self) -> None:
        if not self.stop.is_requested:
            self.stop.request()
            grace = self.target.job.spec.deadlines.termination_grace_seconds
            self.screen.note(stopping(grace))
        elif not self.stop.is_forced:
            self.stop.force()
            self.screen.note("killing it now")

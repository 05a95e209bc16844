"""`ftctl top`: all jobs at a glance, or one of them with its ranks, here or in a cluster."""

import asyncio
import json
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from finetune_operator.api.validation import load_job
from finetune_operator.backends import registry
from finetune_operator.cli.conclusion import EXIT_STOPPED
from finetune_operator.cli.output import takes_unicode
from finetune_operator.cli.run_directories import run_directory
from finetune_operator.cli.top_looks import (
    Look,
    Looks,
    all_here,
    all_in_cluster,
    job_here,
    job_in_cluster,
)
from finetune_operator.cli.top_rows import Screen
from finetune_operator.cli.top_table import tables
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key

_SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_OF_ONE_LOOK = 1.0  # at a job's ranks, by what has changed meanwhile


class TopFormat(StrEnum):
    """How it is written."""

    TEXT = "text"
    JSON = "json"


def top(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|NAME",
            help="Manifest, run directory or name of a job; all jobs, if left out.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Ask the cluster: the namespace of its jobs."),
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Ask the cluster: all jobs.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    output: Annotated[
        TopFormat, typer.Option("-o", "--output", help="text or json; json with --once.")
    ] = TopFormat.TEXT,
) -> None:
    """Show what jobs do now, until Ctrl-C: all at a glance, or of one what each rank does.

    Without --namespace it is about the jobs of this machine, in runs/ of this folder and those
    below it. In a cluster the ranks of a job are read from its pods through the API server, which
    needs the rights to list pods and to get pods/proxy.
    """
    if output is TopFormat.JSON and not once:
        raise typer.BadParameter("-o json prints one look; add --once")
    if not once and not sys.stdout.isatty():
        raise typer.BadParameter("the output is no terminal; add --once")
    if all_namespaces and (namespace is not None or job is not None):
        raise typer.BadParameter("--all-namespaces is about all jobs; leave out what names one")
    looks = _looks(job, namespace, all_namespaces=all_namespaces)
    try:
        asyncio.run(_print_once(looks, output) if once else _show(looks))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(EXIT_STOPPED) from None


def _looks(job: str | None, namespace: str | None, *, all_namespaces: bool) -> Looks:
    if job is None:
        return all_in_cluster(namespace) if namespace or all_namespaces else all_here()
    manifest = load_job(Path(job), may_go_on=True) if os.path.isfile(job) else None
    if manifest and not registry.load(manifest[0].spec.backend.type).runs_without_cluster:
        metadata = manifest[0].metadata
        return job_in_cluster(Key(namespace or metadata.namespace, metadata.name))
    if namespace is not None:
        return job_in_cluster(Key(namespace, manifest[0].metadata.name if manifest else job))
    return job_here(run_directory(job, manifest))


async def _print_once(looks: Looks, output: TopFormat) -> None:
    async with looks as look:
        screen = await look()
        if screen.ranks is not None:
            await asyncio.sleep(_SECONDS_OF_ONE_LOOK)
            screen = await look()
    if output is TopFormat.JSON:
        print(json.dumps(screen.as_json(), indent=2, ensure_ascii=not takes_unicode()))
    else:
        width = None if sys.stdout.isatty() else 1000  # a file cuts no line
        Console(highlight=False, width=width).print(tables(screen))


async def _show(looks: Looks) -> None:
    """Show one look after the other until Ctrl-C.

    Ctrl-C cancels what is awaited, and is remembered besides: a look that ends at that very moment
    may keep the cancellation to itself (`asyncio.wait_for` of Python 3.11 does).
    """
    task, loop, is_asked = asyncio.current_task(), asyncio.get_running_loop(), asyncio.Event()
    assert task is not None, "a coroutine runs in a task"

    def stop() -> None:
        is_asked.set()
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, stop)
    async with looks as look:
        screen = await look()
        with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            while not is_asked.is_set():
                live.update(tables(screen), refresh=True)
                await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
                screen = await _next(look, screen)
    raise asyncio.CancelledError


async def _next(look: Look, before: Screen) -> Screen:
    """Return the next screen; the one before with a note, where there is none for now."""
    try:
        return await look()
    except FineTuneError as error:
        return before.model_copy(update={"notes": (f"{error}; this was the last answer",)})

"""`ftctl top`: show all jobs, or one job with its ranks, on this machine or in a cluster."""

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
from finetune_operator.cli.top_rows import Screen
from finetune_operator.cli.top_screens import (
    ReadScreen,
    ScreenSource,
    all_here,
    all_in_cluster,
    job_here,
    job_in_cluster,
)
from finetune_operator.cli.top_table import tables
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key

_REFRESH_SECONDS = 2.0
_SAMPLE_SECONDS = 1.0  # figures of ranks are computed from two pages


class TopFormat(StrEnum):
    """Output format."""

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
        typer.Option("--namespace", "-n", help="Namespace of the jobs; reads the cluster."),
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="All jobs of the cluster.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and exit.")] = False,
    output: Annotated[
        TopFormat, typer.Option("-o", "--output", help="text or json; json with --once.")
    ] = TopFormat.TEXT,
) -> None:
    """Show all jobs, or the ranks of one job, and refresh until Ctrl-C.

    Without --namespace, show the jobs of this machine, in runs/ of this folder and its subfolders.
    In a cluster, the ranks of a job are read from its pods through the API server, which needs the
    permissions to list pods and to get pods/proxy.
    """
    if output is TopFormat.JSON and not once:
        raise typer.BadParameter("-o json prints one screen; add --once")
    if not once and not sys.stdout.isatty():
        raise typer.BadParameter("the output is not a terminal; add --once")
    if all_namespaces and (namespace is not None or job is not None):
        raise typer.BadParameter("--all-namespaces shows all jobs; leave out job and --namespace")
    source = _source(job, namespace, all_namespaces=all_namespaces)
    try:
        asyncio.run(_print_once(source, output) if once else _show(source))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(EXIT_STOPPED) from None


def _source(job: str | None, namespace: str | None, *, all_namespaces: bool) -> ScreenSource:
    if job is None:
        return all_in_cluster(namespace) if namespace or all_namespaces else all_here()
    manifest = load_job(Path(job), may_resume=True) if os.path.isfile(job) else None
    if manifest and not registry.load(manifest[0].spec.backend.type).runs_without_cluster:
        metadata = manifest[0].metadata
        return job_in_cluster(Key(namespace or metadata.namespace, metadata.name))
    if namespace is not None:
        return job_in_cluster(Key(namespace, manifest[0].metadata.name if manifest else job))
    return job_here(run_directory(job, manifest))


async def _print_once(source: ScreenSource, output: TopFormat) -> None:
    async with source as read_screen:
        screen = await read_screen()
        if screen.ranks is not None:
            await asyncio.sleep(_SAMPLE_SECONDS)
            screen = await read_screen()
    if output is TopFormat.JSON:
        print(json.dumps(screen.as_json(), indent=2, ensure_ascii=not takes_unicode()))
    else:
        width = None if sys.stdout.isatty() else 1000  # lines in a file are not cut
        Console(highlight=False, width=width).print(tables(screen))


async def _show(source: ScreenSource) -> None:
    """Refresh the screen until Ctrl-C.

    Ctrl-C cancels the awaited call and also sets an event: a call that ends at the same moment may
    swallow the cancellation, as `asyncio.wait_for` of Python 3.11 does.
    """
    task, loop, is_asked = asyncio.current_task(), asyncio.get_running_loop(), asyncio.Event()
    assert task is not None, "a coroutine runs in a task"

    def stop() -> None:
        is_asked.set()
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, stop)
    async with source as read_screen:
        screen = await read_screen()
        with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            while not is_asked.is_set():
                live.update(tables(screen), refresh=True)
                await asyncio.sleep(_REFRESH_SECONDS)
                screen = await _next(read_screen, screen)
    raise asyncio.CancelledError


async def _next(read_screen: ReadScreen, before: Screen) -> Screen:
    """Return the next screen, or the previous one with a note if the request fails."""
    try:
        return await read_screen()
    except FineTuneError as error:
        return before.model_copy(update={"notes": (f"{error}; showing the last screen",)})

"""Screens of `ftctl top`: all jobs or one job, on this machine or in a cluster.

Each function returns a context manager around a function that returns the present screen. Figures
of ranks are computed from the difference to the previous call.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from finetune_operator.backends.local.layout import BACKEND as LOCAL
from finetune_operator.backends.local.layout import FILE
from finetune_operator.cli import top_cluster, top_here
from finetune_operator.cli.run_directories import run_directories
from finetune_operator.cli.top_here import JobHere
from finetune_operator.cli.top_ranks import NodePage, ranks_of
from finetune_operator.cli.top_rows import RankRow, Screen, SuspectRow
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import Object

ReadScreen = Callable[[], Awaitable[Screen]]
ScreenSource = AbstractAsyncContextManager[ReadScreen]


@asynccontextmanager
async def all_here() -> AsyncIterator[ReadScreen]:
    """Show all jobs of this folder and its subfolders."""

    async def read_screen() -> Screen:
        found: list[JobHere] = []
        notes: list[str] = []
        for run_dir in run_directories():
            try:
                found.append(top_here.job_in(run_dir))
            except FineTuneError as error:
                notes.append(str(error))
        rows = await asyncio.gather(*map(top_here.row_of, found))
        if not rows and not notes:
            notes = [f"no job below {Path.cwd()}; -n NAMESPACE or -A shows the cluster"]
        return Screen(jobs=tuple(rows), notes=tuple(notes))

    yield read_screen


@asynccontextmanager
async def job_here(run_dir: Path) -> AsyncIterator[ReadScreen]:
    """Show one job of this machine."""
    before: list[NodePage] = []

    async def read_screen() -> Screen:
        nonlocal before
        here = top_here.job_in(run_dir)
        row = await top_here.row_of(here)
        before, ranks, notes = await _ranks_here(here, before, row.suspects)
        return Screen(jobs=(row,), ranks=ranks, notes=notes)

    yield read_screen


@asynccontextmanager
async def all_in_cluster(namespace: str | None) -> AsyncIterator[ReadScreen]:
    """Show all jobs of a namespace in the cluster that kubectl uses; None: of all namespaces."""
    async with await HttpClient.connect() as client:

        async def read_screen() -> Screen:
            rows = await top_cluster.rows_of(client, namespace)
            where = f"namespace {namespace}" if namespace else "the cluster"
            notes = () if rows else (f"no FineTuneJob in {where}",)
            return Screen(jobs=tuple(rows), notes=notes)

        yield read_screen


@asynccontextmanager
async def job_in_cluster(job: Key) -> AsyncIterator[ReadScreen]:
    """Show one job of the cluster that kubectl uses."""
    async with await HttpClient.connect() as client:
        before: list[NodePage] = []

        async def read_screen() -> Screen:
            nonlocal before
            obj = await top_cluster.get_job(client, job)
            row = top_cluster.row_of(obj)
            if (run_dir := _folder_on_this_machine(obj)) is not None:
                here = top_here.job_in(run_dir)
                row = row.model_copy(update={"suspects": (await top_here.row_of(here)).suspects})
                before, ranks, notes = await _ranks_here(here, before, row.suspects)
                return Screen(jobs=(row,), ranks=ranks, notes=notes)
            pods = await top_cluster.read_pods(client, obj)
            row = row.model_copy(update={"suspects": pods.suspects or row.suspects})
            ranks = ranks_of(before, pods.pages, pods.nodes, pods.ranks_per_node, row.suspects)
            before = pods.pages
            return Screen(jobs=(row,), ranks=ranks, notes=tuple(pods.notes))

        yield read_screen


async def _ranks_here(
    here: JobHere, before: Sequence[NodePage], suspects: Sequence[SuspectRow]
) -> tuple[list[NodePage], tuple[RankRow, ...], tuple[str, ...]]:
    pages, notes = await top_here.pages_of(here)
    names = [one.name for one in here.nodes]
    return pages, ranks_of(before, pages, names, here.ranks_per_node, suspects), tuple(notes)


def _folder_on_this_machine(job: Object) -> Path | None:
    """Return the run directory of a job that `ftctl dev` runs on this machine; else None."""
    url = str(((job.get("status") or {}).get("backendRef") or {}).get("url") or "")
    is_local = top_cluster.backend_of(job) == LOCAL and url.startswith(FILE)
    path = Path(url.removeprefix(FILE))
    return path if is_local and path.is_dir() else None

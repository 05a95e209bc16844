"""`ftctl logs`: what one rank of a job on this machine said, now or in the attempt before."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer

from finetune_operator.api.validate import load_job
from finetune_operator.backends import registry
from finetune_operator.backends.base import BackendContext
from finetune_operator.backends.local import records
from finetune_operator.backends.local.layout import attempt_folder, folders_of, handle_for
from finetune_operator.backends.local.records import AttemptRecord
from finetune_operator.errors import FineTuneError
from finetune_operator.reconcile.store import JobStore


def logs(
    job: Annotated[
        str, typer.Argument(metavar="FILE|NAME", help="Manifest, run directory or name of a job.")
    ],
    rank: Annotated[int, typer.Option(min=0, help="Rank whose log is printed.")] = 0,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="The attempt before the newest one.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the attempt ends.")
    ] = False,
) -> None:
    """Print the log of one rank of a job that ran, or runs, on this machine.

    A NAME is looked for as runs/NAMESPACE/NAME in this folder and in the folders below it.
    """
    run_dir = _run_directory(job)
    stored = JobStore(run_dir).load()
    if stored is None or not stored.status.attempt:
        raise FineTuneError(f"{job} has no attempt in {run_dir} yet; start one with ftctl run")
    number = stored.status.attempt - int(previous)
    if number < 1:
        raise FineTuneError(f"{job} has no attempt before the first; leave out --previous")
    # Seen from the run directory itself, so that it may be anywhere and need no manifest.
    backend = registry.load("local")(BackendContext(run_dir, dict(os.environ)))
    folder = attempt_folder(run_dir, number)
    record = records.read(folder.attempt, AttemptRecord)
    if record is None:
        raise FineTuneError(f"{folder.path} holds no attempt; its files were removed")
    handle = handle_for(folder, record.uid, run_dir)
    asyncio.run(_print(backend.logs(handle, rank, follow)))


async def _print(lines: AsyncIterator[str]) -> None:
    async for line in lines:
        print(line, flush=True)


def _run_directory(job: str) -> Path:
    """Find the run directory of what the user named.

    Raises:
        FineTuneError: there is none, or several of that name.
    """
    path = Path(job)
    if path.is_dir():
        if not JobStore(path).path.exists():
            raise FineTuneError(
                f"{job} is no run directory, as it holds no job.json; name a manifest, a run "
                "directory or a job"
            )
        return path.resolve()
    if path.is_file():
        manifest, where = load_job(path, may_go_on=True)
        return folders_of(manifest, where.directory).run
    if "/" in job or path.suffix:
        raise FineTuneError(f"{job} does not exist; name a manifest, a run directory or a job")
    here = Path.cwd()
    found = sorted(
        stored.parent
        for pattern in (f"runs/*/{job}/job.json", f"*/runs/*/{job}/job.json")
        for stored in here.glob(pattern)
    )
    if not found:
        raise FineTuneError(
            f"no run of a job called {job} below {here}; name its manifest or its run directory"
        )
    if len(found) > 1:
        listed = ", ".join(str(one.relative_to(here)) for one in found)
        raise FineTuneError(f"several runs are called {job}: {listed}; name one of these folders")
    return found[0]

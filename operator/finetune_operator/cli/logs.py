"""`ftctl logs`: print the log of a rank, of the newest or the previous attempt."""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneProfile
from finetune_operator.api.validation import load_job
from finetune_operator.backends import registry
from finetune_operator.backends.base import AttemptRef, BackendContext
from finetune_operator.backends.local import records
from finetune_operator.backends.local.layout import BACKEND, attempt_folder, handle_for
from finetune_operator.backends.local.records import AttemptRecord
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.cli.cluster_logs import (
    RankLog,
    attempt_number,
    lines_of,
    once_started,
    print_log,
)
from finetune_operator.cli.conclusion import EXIT_STOPPED
from finetune_operator.cli.run_directories import run_directory
from finetune_operator.cli.target import ProfileOption, profiles_of
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key


def logs(
    job: Annotated[
        str, typer.Argument(metavar="FILE|NAME", help="Manifest, run directory or name of a job.")
    ],
    rank: Annotated[int, typer.Option(min=0, help="Rank whose log is printed.")] = 0,
    previous: Annotated[
        bool,
        typer.Option(
            "--previous", "-p", help="The attempt before the newest, or the only one if it failed."
        ),
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Wait until the job has a log, and print new lines until the attempt ends.",
        ),
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", help="Namespace of the job; the log is then read from the cluster."
        ),
    ] = None,
    profile: ProfileOption = None,
) -> None:
    """Print the log of one rank of a job on this machine, or in a cluster.

    With --namespace, or a manifest whose backend needs a cluster, the log is read from the cluster
    that kubectl uses. The last lines of an attempt stay readable there after its pods are deleted.
    Otherwise, NAME is searched for as runs/NAMESPACE/NAME in this folder and its subfolders.
    """
    wanted = RankLog(rank, previous, follow)
    manifest = load_job(Path(job), may_resume=True) if os.path.isfile(job) else None
    profiles = profiles_of(Path(job) if manifest else None, profile)
    if manifest and not registry.load(manifest[0].spec.backend.type).runs_without_cluster:
        metadata = manifest[0].metadata
        key = Key(namespace or metadata.namespace, metadata.name)
        _until_ctrl_c(print_log(key, wanted, profiles))
    elif namespace is not None:
        name = manifest[0].metadata.name if manifest is not None else job
        _until_ctrl_c(print_log(Key(namespace, name), wanted, profiles))
    else:
        _print_local(run_directory(job, manifest), wanted, profiles)


def _print_local(run_dir: Path, wanted: RankLog, profiles: Mapping[str, FineTuneProfile]) -> None:
    async def read_job() -> FineTuneJob:
        if (stored := RunFolder(run_dir).load()) is None:
            raise FineTuneError(f"{run_dir} holds no job; start one with ftctl run")
        return stored

    def lines(stored: FineTuneJob) -> AsyncIterator[str]:
        return _local_lines(run_dir, stored, wanted, profiles)

    _until_ctrl_c(_print(once_started(read_job, lines, follow=wanted.follow)))


def _local_lines(
    run_dir: Path, stored: FineTuneJob, wanted: RankLog, profiles: Mapping[str, FineTuneProfile]
) -> AsyncIterator[str]:
    kind = registry.load(stored.spec.backend.type)
    if kind.name != BACKEND:
        backend = kind(BackendContext(run_dir.parents[2], dict(os.environ), profiles=profiles))
        return lines_of(backend, stored, wanted)
    # Relative to the run directory, which may be anywhere and needs no manifest.
    backend = kind(BackendContext(run_dir, dict(os.environ)))
    key = Key(stored.metadata.namespace, stored.metadata.name)
    number = attempt_number(str(key), stored.status, previous=wanted.previous)
    folder = attempt_folder(run_dir, number)
    record = records.read(folder.attempt, AttemptRecord)
    if record is None:
        raise FineTuneError(f"{folder.path} holds no attempt; its files were removed")
    handle = handle_for(folder, record.uid, run_dir)
    ref = AttemptRef(key, stored.metadata.uid, number, handle, stored.spec)
    return backend.logs(ref, wanted.rank, wanted.follow)


def _until_ctrl_c(printing: Coroutine[Any, Any, None]) -> None:
    """Print the log; Ctrl-C is the normal way to stop following, so it prints no message."""
    try:
        asyncio.run(printing)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_STOPPED) from None


async def _print(lines: AsyncIterator[str]) -> None:
    async for line in lines:
        print(line, flush=True)

"""Read the jobs of this machine for `ftctl top`: run directories, and the pages of their nodes.

The module only reads; the process that runs a job manages it.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.local import proc, records
from finetune_operator.backends.local.layout import AttemptFolder, attempt_folder
from finetune_operator.backends.local.listening import ports_below
from finetune_operator.backends.local.records import AttemptRecord, NodeRecord
from finetune_operator.backends.local.run_folder import RunFolder, RunFolderError
from finetune_operator.cli.run_directories import shown_path
from finetune_operator.cli.top_ranks import NodePage, read_page
from finetune_operator.cli.top_rows import JobRow, age_in, get_in, progress_in, suspects_in
from finetune_operator.reconcile.conditions import ConditionType, find

_SECONDS = 2.0
_opener = build_opener(ProxyHandler({}))  # without a proxy: the pages are on this machine


@dataclass(frozen=True)
class Node:
    """A node of a job on this machine.

    Attributes:
        url: URL of the page; None if the node has no page or does not run.
    """

    name: str
    url: str | None


@dataclass(frozen=True)
class JobHere:
    """A job of this machine.

    Attributes:
        nodes: Nodes of the newest attempt, by rank.
    """

    job: FineTuneJob
    run_dir: Path
    nodes: Sequence[Node]
    ranks_per_node: int

    @property
    def is_running(self) -> bool:
        """Whether a node has a page."""
        return any(one.url is not None for one in self.nodes)


def job_in(run_dir: Path) -> JobHere:
    """Return the job of a run directory.

    Raises:
        FineTuneError: the directory holds no readable job.
    """
    job = RunFolder(run_dir).load()
    if job is None:
        raise RunFolderError(f"{run_dir} holds no job")
    newest = _newest_attempt(run_dir)
    record = records.read(newest.attempt, AttemptRecord) if newest else None
    if newest is None or record is None:
        return JobHere(job, run_dir, (), 0)
    port = job.spec.observability.metrics_port
    nodes = tuple(_node(newest, rank, port) for rank in range(record.nodes))
    return JobHere(job, run_dir, nodes, record.processes_per_node)


async def row_of(here: JobHere) -> JobRow:
    """Return the row of a job from its status and its newest progress."""
    progress = await _progress(here)
    status, metadata = here.job.status, here.job.metadata
    known = progress_in(progress)
    if not here.is_running:  # the last values do not describe the present
        known |= {"tokens_per_second": None, "eta_seconds": None}
    return JobRow(
        namespace=metadata.namespace,
        name=metadata.name,
        run_directory=shown_path(here.run_dir),
        phase=str((here.is_running and get_in(progress, "phase")) or status.phase.value),
        reason=ready.reason if (ready := find(status, ConditionType.READY)) else None,
        age_seconds=age_in(metadata.model_extra, datetime.now(UTC)),
        attempt=status.attempt,
        restarts=status.restarts.counted,
        suspects=suspects_in(get_in(progress, "suspects")) if here.is_running else (),
        **known,
    )


async def pages_of(here: JobHere) -> tuple[list[NodePage], list[str]]:
    """Return the pages of the nodes that respond, and notes about invalid responses."""
    notes: list[str] = []
    pages = await asyncio.gather(*(_page(one, notes) for one in here.nodes))
    return [one for one in pages if one is not None], notes


async def _page(node: Node, notes: list[str]) -> NodePage | None:
    if node.url is None:
        return None
    try:
        text = await _get(f"{node.url}/metrics")
        return read_page(node.name, text) if text is not None else None
    except (HTTPException, ValueError) as error:
        notes.append(f"the page of {node.name} cannot be read ({error})")
        return None


async def _progress(here: JobHere) -> Any:
    """Return the progress from rank 0's page; from the run directory if there is no page."""
    url = here.nodes[0].url if here.nodes else None
    try:
        text = await _get(f"{url}/progress") if url is not None else None
    except (HTTPException, ValueError):
        text = None  # truncated; the file has the same content
    try:
        return json.loads(text or (here.run_dir / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


async def _get(url: str) -> str | None:
    """Return the text of a page; None if the connection fails.

    Raises:
        HTTPException: the response is truncated, or is not HTTP.
        ValueError: the response is not text.
    """

    def get() -> str | None:
        try:
            with _opener.open(url, timeout=_SECONDS) as response:
                text: str = response.read().decode()
                return text
        except OSError:
            return None  # the node has just ended, or is still starting

    return await asyncio.to_thread(get)


def _newest_attempt(run_dir: Path) -> AttemptFolder | None:
    found = [one.name for one in run_dir.glob("attempts/*") if re.fullmatch("[0-9]+", one.name)]
    return attempt_folder(run_dir, max(map(int, found))) if found else None


def _node(folder: AttemptFolder, rank: int, first_port: int) -> Node:
    name, record = f"node-{rank}", records.read(folder.node(rank), NodeRecord)
    if record is None or not proc.Process(record.pid, record.start_time, record.boot_id).is_alive():
        return Node(name, None)
    # The page takes the first free port, before the ranks take ports of their own.
    ports = [port for port in ports_below(record.pid) if port >= first_port]
    return Node(name, f"http://127.0.0.1:{ports[0]}" if ports else None)

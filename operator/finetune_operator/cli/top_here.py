"""The jobs of this machine for `ftctl top`: run directories, and the pages of their nodes.

It reads only: whoever runs a job looks after its processes.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
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
from finetune_operator.cli.top_ranks import PageLook, read_page
from finetune_operator.cli.top_rows import JobRow, progress_in, suspects_in, told_in

_SECONDS = 2.0
_PORTS_TRIED = 20  # as the trainer does
_ask = build_opener(ProxyHandler({}))  # no proxy leads to this machine


@dataclass(frozen=True)
class Node:
    """One node of a job on this machine.

    Attributes:
        url: Where its page is; None where it has none, or does not run.
    """

    name: str
    url: str | None


@dataclass(frozen=True)
class JobHere:
    """One job of this machine.

    Attributes:
        nodes: Those of its newest attempt, in their order.
    """

    job: FineTuneJob
    run_dir: Path
    nodes: Sequence[Node]
    ranks_per_node: int

    @property
    def is_running(self) -> bool:
        """Whether a page of it can be asked."""
        return any(one.url is not None for one in self.nodes)


def job_in(run_dir: Path) -> JobHere:
    """Return the job of a run directory.

    Raises:
        FineTuneError: it holds none that can be read.
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
    """Return what a job's status and its newest progress say."""
    told = await _progress(here)
    status = here.job.status
    known = progress_in(told)
    if not here.is_running:  # what it was doing is not what it does
        known |= {"tokens_per_second": None, "eta_seconds": None}
    return JobRow(
        namespace=here.job.metadata.namespace,
        name=here.job.metadata.name,
        run_directory=shown_path(here.run_dir),
        phase=str((here.is_running and told_in(told, "phase")) or status.phase.value),
        attempt=status.attempt,
        restarts=status.restarts.counted,
        suspects=suspects_in(told_in(told, "suspects")) if here.is_running else (),
        **known,
    )


async def pages_of(here: JobHere) -> tuple[list[PageLook], list[str]]:
    """Return the pages of a job's nodes that answer, and what is wrong with an answer."""
    notes: list[str] = []
    pages = await asyncio.gather(*(_page(one, notes) for one in here.nodes))
    return [one for one in pages if one is not None], notes


async def _page(node: Node, notes: list[str]) -> PageLook | None:
    if node.url is None:
        return None
    try:
        text = await _get(f"{node.url}/metrics")
        return read_page(node.name, text) if text is not None else None
    except (HTTPException, ValueError) as error:
        notes.append(f"the page of {node.name} cannot be read ({error})")
        return None


async def _progress(here: JobHere) -> Any:
    """Return the progress of rank 0's page, and of the run directory where there is none."""
    url = here.nodes[0].url if here.nodes else None
    try:
        text = await _get(f"{url}/progress") if url is not None else None
    except (HTTPException, ValueError):
        text = None  # cut off; the file says as much
    try:
        return json.loads(text or (here.run_dir / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


async def _get(url: str) -> str | None:
    """Return the text of a page; None where nothing answers.

    Raises:
        HTTPException: the answer is cut off, or is no HTTP.
        ValueError: it is no text.
    """

    def get() -> str | None:
        try:
            with _ask.open(url, timeout=_SECONDS) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return None  # it has just ended, or has not begun

    return await asyncio.to_thread(get)


def _newest_attempt(run_dir: Path) -> AttemptFolder | None:
    found = [one.name for one in run_dir.glob("attempts/*") if re.fullmatch("[0-9]+", one.name)]
    return attempt_folder(run_dir, max(map(int, found))) if found else None


def _node(folder: AttemptFolder, rank: int, first_port: int) -> Node:
    name, record = f"node-{rank}", records.read(folder.node(rank), NodeRecord)
    if record is None or not proc.Process(record.pid, record.start_time, record.boot_id).is_alive():
        return Node(name, None)
    tried = range(first_port, first_port + _PORTS_TRIED)
    ports = [port for port in ports_below(record.pid) if port in tried]
    return Node(name, f"http://127.0.0.1:{ports[0]}" if ports else None)

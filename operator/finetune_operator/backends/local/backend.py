"""The local backend: runs an attempt as processes of this machine; the default of `ftctl run`.

Each node is a process group: `python -P -m finetune_trainer CONFIG` starts and supervises the
node's ranks. All state that must outlive `ftctl` is in the attempt's folder (see `layout`), so that
another `ftctl` finds the processes after this one was killed. This file only connects the verbs to
their modules.
"""

import asyncio
import platform
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import (
    Attempt,
    AttemptRef,
    Backend,
    BackendContext,
    Found,
    Handle,
    Observation,
    Request,
    Written,
)
from finetune_operator.backends.local import layout, machine_checks, nodes, overlaps, proc, records
from finetune_operator.backends.local.environment import ENV_MARK, mark
from finetune_operator.backends.local.gpus import size_here
from finetune_operator.backends.local.layout import BACKEND, AttemptFolder, Folders
from finetune_operator.backends.local.rank_logs import read_log
from finetune_operator.backends.local.records import AttemptRecord, CancelRecord
from finetune_operator.backends.local.render import attempt_uid, render
from finetune_operator.backends.local.start import start
from finetune_operator.errors import BackendError
from finetune_operator.planner.catalogue import GpuSize
from finetune_operator.planner.plan import Plan
from finetune_trainer.config import Termination

TRAINER = (sys.executable, "-P", "-m", "finetune_trainer")

# In an operator, every user who may create a job could run programs with the operator's token.
_IN_A_CLUSTER = (
    "local would run in the operator's own pod; use kubernetes, or run the job on your machine "
    "with ftctl"
)


class LocalBackend(Backend):
    """Backend `local`: this machine as `nodes` x `processesPerNode`.

    Args:
        context: Folder of the manifest, and the environment that is passed on in part.
        command: Command of each node; the path of its configuration is appended.
        cores: CPU cores that ranks share.
        gpus: Counts the machine's GPUs.
        system: Operating system, as `platform.system` names it; absent means this machine's.
    """

    name: ClassVar[str] = BACKEND
    needs_finalizer: ClassVar[bool] = True
    finds_from_cache: ClassVar[bool] = False
    runs_without_cluster: ClassVar[bool] = True
    runs_on_this_machine: ClassVar[bool] = True

    def __init__(
        self,
        context: BackendContext,
        *,
        command: Sequence[str] = TRAINER,
        cores: int | None = None,
        gpus: Callable[[], int] = machine_checks.installed_gpus,
        system: str | None = None,
    ) -> None:
        self._context = context
        self._command = tuple(command)
        self._cores = cores or machine_checks.usable_cores()
        self._gpus = gpus
        self._system = system or platform.system()

    def folders(self, job: FineTuneJob) -> Folders:
        """Return where the job's files are."""
        return layout.folders_of(job, self._context.manifest_dir)

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """List the URIs of the job that cannot be on this machine."""
        if self._context.cluster is not None:
            return [Problem("spec.backend.type", _IN_A_CLUSTER)]
        return machine_checks.unsupported(job, self._context.manifest_dir)

    def gpu_sizes(self, job: FineTuneJob) -> Sequence[GpuSize]:
        """List the GPUs of this machine as one size, if their memory is known."""
        wanted = job.spec.topology.nodes * job.spec.topology.gpus_per_node
        if self._context.cluster is not None or not wanted:
            return ()
        found = size_here(wanted, self._context.environ)
        return () if found is None else (found,)

    def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        """List missing inputs, folders that cannot be written, and missing GPUs and libraries."""
        if self._context.cluster is not None:
            return []  # the job is refused, and its paths would be read in the operator's pod
        base, environ = self._context.manifest_dir, self._context.environ
        found = machine_checks.missing(
            job, base, environ, cores=self._cores, gpus=self._gpus, system=self._system
        )
        return [*(machine_checks.missing_libraries() if self._command == TRAINER else ()), *found]

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """List the run directory, and the folders that the job names."""
        if self._context.cluster is not None:
            return []
        return overlaps.written(job, self._context.manifest_dir)

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return the attempt's files and processes."""
        return render(plan, attempt, self._context, self._command, self._cores)

    async def submit(self, request: Request) -> Handle:
        """Start the nodes that were never started; adopt nodes that run or have ended."""
        folder = AttemptFolder(Path(request.name))
        uid = start(request, folder, self._context.environ)
        return layout.handle_for(folder, uid, self._context.manifest_dir)

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Return the attempt if its record was written."""
        folder = layout.attempt_folder(self.folders(job).run, attempt.number)
        record = records.read(folder.attempt, AttemptRecord)
        if record is None or record.uid != attempt_uid(job, attempt):
            return None
        return Found(layout.handle_for(folder, record.uid, self._context.manifest_dir))

    async def observe(self, ref: AttemptRef) -> Observation:
        """Observe the attempt's processes and files, and carry out a kill that is overdue."""
        folder = self._folder(ref)
        with _usable(folder):
            return nodes.observation_of(folder, ref.handle, self._now())

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Send SIGTERM once; a later call can only make the kill earlier."""
        folder = self._folder(ref)
        with _usable(folder):
            _cancel(folder, ref.handle, until.timestamp(), self._now())
        return True

    async def logs(self, ref: AttemptRef, rank: int, follow: bool = False) -> AsyncIterator[str]:
        """Yield one rank's events as lines, or its node's output if it has no events."""
        folder, handle = self._folder(ref), ref.handle
        record = nodes.owned(folder, handle)
        if record is None:
            yield f"{folder.path} no longer holds attempt {handle.uid}"
            return

        def is_finished() -> bool:
            return nodes.observation_of(folder, handle, self._now()).all_gone

        async for line in read_log(folder, record, rank, is_finished if follow else None):
            yield line
            await asyncio.sleep(0)

    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return the exported folders that exist, as `file://` URIs."""
        folder = self._folder(ref)
        record = nodes.owned(folder, ref.handle)
        if record is None:
            return ()
        named: list[str] = []
        for rank in range(record.nodes):
            if (ended := records.read(folder.termination(rank), Termination)) is not None:
                named += ended.artifacts
        paths = [path.removeprefix(layout.FILE) for path in named or [record.output_dir]]
        return [f"{layout.FILE}{path}" for path in dict.fromkeys(paths) if Path(path).exists()]

    def _now(self) -> float:
        return self._context.now().timestamp()

    def _folder(self, ref: AttemptRef) -> AttemptFolder:
        return layout.folder_of(ref.handle, self._context.manifest_dir)


def _cancel(folder: AttemptFolder, handle: Handle, deadline: float, now: float) -> None:
    record = nodes.owned(folder, handle)
    if record is None:
        for process in proc.marked(ENV_MARK, mark(handle.uid)):
            process.send(signal.SIGKILL)  # its folder is deleted, so no checkpoint can be saved
        return
    there = records.read(folder.cancel, CancelRecord)
    if there is None:
        # The signal is sent before it is recorded, so that it is repeated after a crash between the
        # two.
        nodes.send(record, nodes.observe_nodes(folder, record), signal.SIGTERM)
    if there is None or deadline < there.deadline:
        wish = CancelRecord(deadline=deadline, grace_seconds=max(0.0, round(deadline - now)))
        records.write(folder.cancel, wish)
    nodes.enforce(folder, record, now)


@contextmanager
def _usable(folder: AttemptFolder) -> Iterator[None]:
    """Raise a BackendError if the attempt's files cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise BackendError(
            f"{folder.path} cannot be used ({error.strerror}); make room, or make it writable, and "
            "the job continues"
        ) from error

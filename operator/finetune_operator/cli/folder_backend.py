"""The local backend of `ftctl`, in which one job at a time owns a run folder.

The folder is named after the job's namespace and name, which a later job may reuse: files of the
earlier job are moved aside before the first attempt. `job.json` records the owner of the folder,
for `ftctl run`, `ftctl dev` and `ftctl logs`.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import (
    Attempt,
    AttemptRef,
    BackendContext,
    Handle,
    Observation,
    Request,
)
from finetune_operator.backends.local import proc
from finetune_operator.backends.local.backend import TRAINER, LocalBackend
from finetune_operator.backends.local.environment import ENV_MARK
from finetune_operator.backends.local.layout import folder_of
from finetune_operator.backends.local.run_folder import RunFolder, RunFolderError
from finetune_operator.errors import BackendError, TransientError
from finetune_operator.planner.plan import Plan
from finetune_operator.reconcile import attempts

log = logging.getLogger(__name__)


class FolderBackend(LocalBackend):
    """Backend `local` that locks each run folder while a process of its job runs.

    Args:
        context: The folder of the manifests, and the environment, part of which is passed on.
        is_forced: Whether a cancelled attempt gets no grace period.
        command: Command of a node; the path of its configuration is appended.
        held: The run folder of the only job, already locked by the caller.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        is_forced: Callable[[], bool] = lambda: False,
        command: Sequence[str] = TRAINER,
        held: RunFolder | None = None,
    ) -> None:
        super().__init__(context, command=command)
        self._is_forced = is_forced
        self._base = context.manifest_dir
        self._jobs: dict[str, FineTuneJob] = {}
        self._of_caller = held
        self._held: dict[Path, RunFolder] = {}

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return the attempt's files and processes."""
        self._jobs[plan.job.metadata.uid] = plan.job
        return super().render(plan, attempt)

    async def submit(self, request: Request) -> Handle:
        """Start the attempt in a folder that belongs to its job.

        Raises:
            RunFolderError: another process runs a job in the folder, or it holds other files.
            BackendError: processes of the previous job are still alive, or as for every backend.
        """
        job = self._jobs[request.job_uid]
        folders = self.folders(job)
        store = self._hold(folders.run, folders.checkpoint, folders.output)
        _claim(store, job, request.attempt)
        return await super().submit(request)

    async def observe(self, ref: AttemptRef) -> Observation:
        """Observe the attempt, and unlock its folder when all its processes have ended."""
        run_dir = folder_of(ref.handle, self._base).run_dir
        seen = await super().observe(ref)
        if seen.all_gone:
            self._release(run_dir)
        elif run_dir.is_dir():
            try:
                self._hold(run_dir)  # an earlier process may have started the attempt
            except RunFolderError as error:
                raise TransientError(str(error)) from error
        return seen

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Send SIGTERM once; a later call can only bring the kill forward."""
        return await super().cancel(ref, datetime.now(UTC) if self._is_forced() else until)

    def release_all(self) -> None:
        """Unlock all folders; attempts keep running."""
        for run_dir in list(self._held):
            self._release(run_dir)

    def _hold(self, run_dir: Path, *others: Path) -> RunFolder:
        if self._of_caller is not None:
            return self._of_caller
        if run_dir not in self._held:
            self._held[run_dir] = RunFolder(run_dir, *others).__enter__()
        return self._held[run_dir]

    def _release(self, run_dir: Path) -> None:
        if (store := self._held.pop(run_dir, None)) is not None:
            store.__exit__()


def _claim(store: RunFolder, job: FineTuneJob, number: int) -> None:
    """Move aside the files of another job, and record the owner of the attempt.

    A job with `takeOver` continues with the files of the other job, and only renames its attempts.
    """
    existing = store.load()
    if existing is not None and existing.metadata.uid != job.metadata.uid:
        if alive := proc.marked(ENV_MARK, f"{existing.metadata.uid}-"):
            raise BackendError(
                f"{store.run_dir} is still written by process {alive[0].pid} of an earlier job of "
                "that name; end that one first"
            )
        if job.spec.take_over:
            store.make_way()
        else:
            moved = store.move_aside(job.metadata)
            log.info("earlier run moved aside", extra={"folder": str(moved)})
        existing = None
    if existing is None or existing.status.attempt < number:
        # Record the status as if the operator had crashed right after it opened the attempt.
        before = job.status.model_copy(update={"attempt": number - 1, "attempts": []})
        status = attempts.open_next(before, datetime.now(UTC))
        store.save(job.model_copy(update={"status": status}))

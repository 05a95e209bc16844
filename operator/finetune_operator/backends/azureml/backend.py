"""The azureml backend: an attempt is one command job of an Azure ML workspace.

Attempts are polled in the background (`polling`), so observing sends no request. The Azure SDK is
imported when the first job of this backend is about to run.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from functools import partial
from typing import ClassVar

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.azureml import compute_checks, names
from finetune_operator.backends.azureml.computes import Computes
from finetune_operator.backends.azureml.names import (
    BACKEND,
    PROFILE_FIELD,
    JobProfile,
    azureml_of,
    profile_of,
)
from finetune_operator.backends.azureml.places import OUTPUT, written
from finetune_operator.backends.azureml.polling import Poller
from finetune_operator.backends.azureml.render import render
from finetune_operator.backends.azureml.run_logs import read_log
from finetune_operator.backends.azureml.runs import COMPLETED
from finetune_operator.backends.azureml.submit import Stops, handle_of, is_own, poll_now, submit
from finetune_operator.backends.azureml.workspace_client import Azure, Workspace
from finetune_operator.backends.base import (
    Attempt,
    AttemptPhase,
    AttemptRef,
    Backend,
    BackendContext,
    Found,
    Handle,
    Limits,
    Observation,
    Request,
    Services,
    Written,
)
from finetune_operator.backends.budget import Priority
from finetune_operator.backends.profiles import (
    PROFILES,
    USED_BY_KUBERNETES,
    ProfileError,
    Profiles,
    profile_to_render,
)
from finetune_operator.errors import TransientError
from finetune_operator.kube.watch import Watch
from finetune_operator.planner.plan import Plan

_ASK_SECONDS = 20.0


class AzureMLBackend(Backend):
    """Backend `azureml`: workspaces of Azure ML that FineTuneProfiles name.

    Args:
        context: Contains the cluster in the operator, and elsewhere the known profiles.
    """

    name: ClassVar[str] = BACKEND
    needs_finalizer: ClassVar[bool] = True
    finds_from_cache: ClassVar[bool] = False
    runs_without_cluster: ClassVar[bool] = True
    pages_are_scraped: ClassVar[bool] = False
    watches: ClassVar[tuple[Watch, ...]] = (PROFILES,)
    threads: ClassVar[int] = 6
    limits: ClassVar[Limits] = Limits(
        submit=60, find=45, cancel=60, collect=45, late_submit=120, unconfirmed_cancel=900
    )

    def __init__(self, context: BackendContext) -> None:
        self._profiles = Profiles(context.cluster, context.profiles, USED_BY_KUBERNETES)
        self._now = context.now
        self._azure = Azure(context.environ)
        self._computes = Computes()
        self._stops = Stops()
        self._poller = Poller(self._workspace_of, context.now)
        self._services: Services | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, services: Services) -> None:
        """Start polling attempts."""
        self._services, self._loop = services, asyncio.get_running_loop()
        self._azure.start(services)
        self._poller.start(services)

    async def close(self) -> None:
        """Stop sending requests."""
        self._azure.close()
        self._loop = None
        await self._poller.close()
        await self._computes.close()

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """List unsupported features, and fields that the job's profile forbids."""
        found = compute_checks.impossible(job)
        if found:
            return found
        try:
            profile = profile_of(job, self._profiles)
        except ProfileError as error:
            return [error.problem(PROFILE_FIELD)]
        return compute_checks.forbidden(job, profile)

    def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        """List missing libraries, and resources that Azure cannot give the job."""
        missing, loop = compute_checks.missing_library(), self._loop
        if missing or loop is None:  # no request to Azure is allowed before the start
            return missing
        return asyncio.run_coroutine_threadsafe(self._ask_azure(job), loop).result()

    async def _ask_azure(self, job: FineTuneJob) -> Sequence[Problem]:
        try:
            workspace, profile = self._place_of(job)
        except TransientError:
            return []  # `validate` reports it
        return await self._computes.problems_in_time(workspace, job, profile, _ASK_SECONDS)

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        """List the folders that the job writes, in its profile's workspace if that is known."""
        try:
            profile = profile_of(job, self._profiles)
        except ProfileError:
            return written(job, None)
        return written(job, profile.settings)

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        """Return the attempt's command job.

        Raises:
            BackendError: The job's profile is unknown or no longer allows the job, or the
                configuration
                is too long.
        """
        profile_of_job = partial(profile_of, profiles=self._profiles)
        profile = profile_to_render(self, plan.job, profile_of_job, PROFILE_FIELD)
        return render(plan, profile, attempt)

    async def submit(self, request: Request) -> Handle:
        """Adopt the job of that name, or create it."""
        (made,) = request.objects
        workspace_id, _ = names.parts_of(request.name)
        workspace = self._asked_as(workspace_id, made["tags"][names.PROFILE_TAG])
        before = partial(self._computes.refuse_unchecked, request.job_uid, self._place_of)
        job = await submit(workspace, made, before)
        self._poller.note(job)
        return handle_of(workspace, job)

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        """Ask for the job of the attempt by its name."""
        workspace, _ = self._place_of(job)
        there = await workspace.job(names.job_name(job, attempt.number), Priority.WRITE)
        if there is None or not is_own(there, names.tags(job, attempt.number)):
            return None
        self._poller.note(there)
        return Found(handle_of(workspace, there), there.created)

    async def observe(self, ref: AttemptRef) -> Observation:
        """Return the last poll as an observation."""
        if _is_strange(ref):
            return Observation(AttemptPhase.UNKNOWN, all_gone=True, message="of another job")
        return self._poller.observe(ref)

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        """Ask the trainer to save a checkpoint and stop if it listens; otherwise cancel the job.

        If it is called again at `until`, even by a new operator process, it cancels the job.
        """
        if _is_strange(ref):
            return True
        workspace, services = self._workspace_of(ref), self._services
        if services is None:
            raise TransientError("the backend is closed")
        if (
            view := self._poller.newest(ref)
        ) is None:  # with many attempts the first poll may take long
            view = await poll_now(workspace, ref, self._now())
            self._poller.use_early_view(ref, view)
        now = self._now()
        if await self._stops.stop(workspace, ref, view, until, now):
            left = (until - now).total_seconds()
            asyncio.get_running_loop().call_later(left, services.wake, ref.job)
        self._poller.note_stop(ref, until)
        return True

    def logs(self, ref: AttemptRef, rank: int, follow: bool = False) -> AsyncIterator[str]:
        """Yield the lines of the node of that rank."""
        return read_log(self._workspace_of(ref), ref, rank, follow)

    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        """Return the URI of the trained model, once the job has completed."""
        if _is_strange(ref):
            return []
        _, name = names.parts_of(ref.handle.name)
        job = await self._workspace_of(ref).job(name, Priority.WRITE)
        if job is None or job.status != COMPLETED or OUTPUT not in job.outputs:
            return []
        return [job.outputs[OUTPUT]]

    def forget(self, job_uid: str) -> None:
        """Drop the state of a finished or deleted job."""
        self._poller.forget(job_uid)
        self._stops.forget(job_uid)
        self._computes.forget(job_uid)

    def _place_of(self, job: FineTuneJob) -> tuple[Workspace, JobProfile]:
        """Return the workspace of a job, and its current profile.

        Raises:
            TransientError: The profile does not exist.
        """
        try:
            profile = profile_of(job, self._profiles)
        except ProfileError as error:
            raise TransientError(f"{PROFILE_FIELD} {error}") from error
        settings = profile.settings
        return self._azure.workspace(names.workspace_id(settings), settings.client_id), profile

    def _workspace_of(self, ref: AttemptRef) -> Workspace:
        """Return the workspace that an attempt is in."""
        workspace_id, _ = names.parts_of(ref.handle.name)
        return self._asked_as(workspace_id, azureml_of(ref.spec).profile if ref.spec else "")

    def _asked_as(self, workspace_id: str, name: str) -> Workspace:
        """Return a workspace whose requests use the identity of a profile that names it.

        Args:
            workspace_id: Azure's id of the workspace.
            name: Name of the profile. If the profile now names another workspace, the identity of
                any profile that names this workspace is used, and without one the operator's own
                identity.
        """
        for one in (name, *self._profiles.names()):
            try:
                settings = self._profiles.get(one).azureml
            except ProfileError:
                continue
            if settings is None:
                continue
            if names.workspace_id(settings).lower() == workspace_id.lower():  # in Azure's form
                return self._azure.workspace(workspace_id, settings.client_id)
        return self._azure.workspace(workspace_id, None)


def _is_strange(ref: AttemptRef) -> bool:
    return ref.handle.uid != ref.job_uid

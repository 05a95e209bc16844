"""Asks Azure, before an attempt is opened, whether the compute can run the job.

`AzureMLBackend.check_inputs` calls it. Responses are cached for some minutes, for all jobs.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.azureml.compute_checks import (
    Compute,
    on_cluster,
    on_kubernetes,
    on_serverless,
)
from finetune_operator.backends.azureml.names import FIELD, PROFILE_FIELD, JobProfile
from finetune_operator.backends.azureml.sdk import RefusedError, Sdk
from finetune_operator.backends.azureml.workspace_client import Workspace
from finetune_operator.backends.budget import Priority
from finetune_operator.backends.response_cache import ResponseCache
from finetune_operator.errors import TransientError

T = TypeVar("T")

_COMPUTE_FIELD = f"{FIELD}.compute"
_CLUSTER, _KUBERNETES = "amlcompute", "kubernetes"


@dataclass(frozen=True)
class _Questions:
    """Questions about one workspace.

    Attributes:
        priority: Priority of each request.
        responses: Cached responses about all workspaces.
    """

    workspace: Workspace
    priority: Priority
    responses: ResponseCache

    async def environment(self, environment: str) -> list[Problem]:
        """Return a problem if the environment does not exist."""
        name, _, version = environment.removeprefix("azureml:").partition(":")
        if name.startswith("//"):
            return []  # it is in a registry; if it does not exist, Azure ML refuses the job
        there = await self.cached(
            ("environments", name, version),
            lambda sdk: sdk.ml.environments.get(name, version).name,
        )
        if there is not None:
            return []
        text = f"{environment} does not exist in {_name(self.workspace)}; register it there"
        return [Problem(f"{FIELD}.environment", text)]

    async def location(self) -> str:
        """Return the location of the workspace."""
        name = self.workspace.id.rpartition("/")[2]
        found = await self.cached(
            ("location",), lambda sdk: str(sdk.ml.workspaces.get(name).location)
        )
        return found or ""

    async def sizes(self, location: str) -> Mapping[str, int]:
        """Return the GPUs of each VM size of a location."""
        found = await self.cached(("sizes", location), lambda sdk: _sizes(sdk, location))
        return found or {}

    async def cached(self, what: tuple[str, ...], call: Callable[[Sdk], T]) -> T | None:
        """Return the result of one request, possibly cached; None if the object does not exist."""

        async def ask() -> T | None:
            try:
                return await self.workspace.ask(call, self.priority)
            except RefusedError as error:
                if error.status != 404:
                    raise
                return None

        key = (self.workspace.id, self.workspace.client_id, *what)
        return await self.responses.get(key, ask)


class Computes:
    """Azure's responses about computes, environments and sizes."""

    def __init__(self) -> None:
        self._responses = ResponseCache()
        self._unchecked: dict[str, FineTuneJob] = {}  # by uid

    async def close(self) -> None:
        """Stop sending requests."""
        await self._responses.close()

    def forget(self, job_uid: str) -> None:
        """Drop the state of a job."""
        self._unchecked.pop(job_uid, None)

    async def problems_in_time(
        self, workspace: Workspace, job: FineTuneJob, profile: JobProfile, seconds: float
    ) -> list[Problem]:
        """Return the problems that Azure reports for the job within some seconds.

        Without a response, `refuse_unchecked` asks again before the job is submitted.
        """
        self._unchecked[job.metadata.uid] = job
        try:
            async with asyncio.timeout(seconds):
                found = await self.problems(workspace, job, profile, Priority.CHECK)
        except (TransientError, TimeoutError):
            return []
        self.forget(job.metadata.uid)
        return found

    async def refuse_unchecked(
        self, job_uid: str, where: Callable[[FineTuneJob], tuple[Workspace, JobProfile]]
    ) -> None:
        """Repeat the requests that had no response.

        Args:
            job_uid: Uid of the job.
            where: Returns its current workspace and profile, or raises a BackendError.

        Raises:
            TransientError: There is no response.
            RefusedError: The compute cannot run the job.
        """
        if (job := self._unchecked.get(job_uid)) is not None:
            workspace, profile = where(job)
            if found := await self.problems(workspace, job, profile, Priority.WRITE):
                raise RefusedError("; ".join(map(str, found)))
            self.forget(job_uid)

    async def problems(
        self, workspace: Workspace, job: FineTuneJob, profile: JobProfile, priority: Priority
    ) -> list[Problem]:
        """Return the problems that prevent the job from running in the workspace.

        Args:
            workspace: The workspace.
            job: The job.
            profile: Its profile.
            priority: Priority of the requests.

        Raises:
            TransientError: There is no response.
        """
        asked = _Questions(workspace, priority, self._responses)
        try:
            found = await asked.environment(profile.environment_of(job))
            name = profile.compute_of(job)
            if name is None:
                gpus = await asked.sizes(await asked.location())
                return [*found, *on_serverless(job, gpus)]
            compute = await asked.cached(
                ("computes", name), lambda sdk: _compute(sdk.ml.compute.get(name))
            )
            if compute is None:
                text = f"{name} does not exist in {_name(workspace)}; create or attach it there"
                return [*found, Problem(_COMPUTE_FIELD, text)]
            if compute.kind == _KUBERNETES:
                return [*found, *on_kubernetes(job, name, compute)]
            if compute.kind != _CLUSTER:
                text = f"{name} is of type {compute.kind}; name another, AmlCompute or Kubernetes"
                return [*found, Problem(_COMPUTE_FIELD, text)]
            gpus = await asked.sizes(compute.location)
            return [*found, *on_cluster(job, name, compute, gpus)]
        except RefusedError as error:
            text = f"{profile.name} cannot be used: {error}; {_remedy(error, workspace)}"
            return [Problem(PROFILE_FIELD, text)]


def _compute(found: Any) -> Compute:
    kind = str(found.type).lower()
    if kind == _CLUSTER:
        is_spot = str(found.tier).lower().replace("_", "") == "lowpriority"
        return Compute(kind, found.location, found.size, is_spot, found.max_instances)
    if kind == _KUBERNETES:
        properties = found.properties
        types = properties.get("instanceTypes") or {}
        gpus = {name: _gpus(one) for name, one in types.items()}
        return Compute(
            kind, "", gpus=gpus, default_type=properties.get("defaultInstanceType") or ""
        )
    return Compute(kind, "")


def _gpus(instance_type: Any) -> int:
    limits = ((instance_type or {}).get("resources") or {}).get("limits") or {}
    return int(limits.get("nvidia.com/gpu") or 0)


def _sizes(sdk: Sdk, location: str) -> dict[str, int]:
    found = sdk.ml.compute.list_sizes(location=location)
    return {one.name.lower(): int(one.gpus or 0) for one in found}


def _remedy(error: RefusedError, workspace: Workspace) -> str:
    if error.status == 403:
        return f"give the operator's identity the role AzureML Data Scientist in {_name(workspace)}"
    return "check the operator's identity and the profile's workspace"


def _name(workspace: Workspace) -> str:
    return f"workspace {workspace.id.rpartition('/')[2]}"

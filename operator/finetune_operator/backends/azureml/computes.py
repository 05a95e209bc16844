"""What only Azure can tell of a job before an attempt is opened: whether its compute can run it.

`AzureMLBackend.check_inputs` asks; answers are kept for some minutes, for all jobs.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.topology import Capacity
from finetune_operator.backends.answers import Answers
from finetune_operator.backends.azureml.client import Workspace
from finetune_operator.backends.azureml.names import FIELD, PROFILE_FIELD, JobProfile
from finetune_operator.backends.azureml.sdk import RefusedError, Sdk
from finetune_operator.backends.budget import Priority
from finetune_operator.errors import TransientError

T = TypeVar("T")

_COMPUTE_FIELD = f"{FIELD}.compute"
_SIZE_FIELD = "spec.topology.instanceType"
_CLUSTER, _KUBERNETES = "amlcompute", "kubernetes"


@dataclass(frozen=True)
class Compute:
    """A compute of a workspace.

    Attributes:
        kind: As the SDK calls it.
        location: Where it is.
        size: Of its nodes, where all have the same.
        is_spot: Whether its nodes may be taken away.
        max_nodes: How many nodes it may have; None where that is not told.
        gpus: Of a node, by instance type, where a job has the choice.
        default_type: Instance type of a job that names none.
    """

    kind: str
    location: str
    size: str = ""
    is_spot: bool = False
    max_nodes: int | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)
    default_type: str = ""


class Computes:
    """What Azure has answered about computes, environments and sizes."""

    def __init__(self) -> None:
        self._answers = Answers()
        self._unchecked: dict[str, tuple[Workspace, FineTuneJob, JobProfile]] = {}  # by uid

    async def close(self) -> None:
        """Ask for nothing any more."""
        await self._answers.close()

    def forget(self, job_uid: str) -> None:
        """Drop what is kept about a job."""
        self._unchecked.pop(job_uid, None)

    async def problems_in_time(
        self, workspace: Workspace, job: FineTuneJob, profile: JobProfile, seconds: float
    ) -> list[Problem]:
        """Return what keeps the job from running, as far as Azure says so within some seconds.

        Where it does not, `refuse_unchecked` asks again before the job is submitted.
        """
        self._unchecked[job.metadata.uid] = (workspace, job, profile)
        try:
            async with asyncio.timeout(seconds):
                found = await self.problems(workspace, job, profile)
        except (TransientError, TimeoutError):
            return []
        self.forget(job.metadata.uid)
        return found

    async def refuse_unchecked(self, job_uid: str) -> None:
        """Ask for what was not answered before.

        Raises:
            TransientError: nobody can say, or the compute cannot run the job, which may be mended.
        """
        if unchecked := self._unchecked.get(job_uid):
            if found := await self.problems(*unchecked):
                raise TransientError("; ".join(map(str, found)))
            self.forget(job_uid)

    async def problems(
        self, workspace: Workspace, job: FineTuneJob, profile: JobProfile
    ) -> list[Problem]:
        """Return what keeps the job from running in the workspace.

        Raises:
            TransientError: nobody can say now.
        """
        try:
            found = await self._environment(workspace, profile.environment_of(job))
            name = profile.compute_of(job)
            if name is None:
                gpus = await self._sizes(workspace, await self._location(workspace))
                return [*found, *_on_serverless(job, gpus)]
            compute = await self._kept_answer(
                workspace, ("computes", name), lambda sdk: _compute(sdk.ml.compute.get(name))
            )
            if compute is None:
                text = f"{name} does not exist in {_name(workspace)}; create or attach it there"
                return [*found, Problem(_COMPUTE_FIELD, text)]
            if compute.kind == _KUBERNETES:
                return [*found, *_on_kubernetes(job, name, compute)]
            if compute.kind != _CLUSTER:
                text = f"{name} is of type {compute.kind}; name an AmlCompute or a Kubernetes one"
                return [*found, Problem(_COMPUTE_FIELD, text)]
            gpus = await self._sizes(workspace, compute.location)
            return [*found, *_on_cluster(job, name, compute, gpus)]
        except RefusedError as error:
            text = f"{profile.name} cannot be used: {error}; {_cure(error, workspace)}"
            return [Problem(PROFILE_FIELD, text)]

    async def _environment(self, workspace: Workspace, environment: str) -> list[Problem]:
        name, _, version = environment.removeprefix("azureml:").partition(":")
        if name.startswith("//"):
            return []  # of a registry: the job is refused where it does not exist
        there = await self._kept_answer(
            workspace,
            ("environments", name, version),
            lambda sdk: sdk.ml.environments.get(name, version).name,
        )
        if there is not None:
            return []
        text = f"{environment} does not exist in {_name(workspace)}; register it there"
        return [Problem(f"{FIELD}.environment", text)]

    async def _location(self, workspace: Workspace) -> str:
        name = workspace.id.rpartition("/")[2]
        found = await self._kept_answer(
            workspace, ("location",), lambda sdk: str(sdk.ml.workspaces.get(name).location)
        )
        return found or ""

    async def _sizes(self, workspace: Workspace, location: str) -> Mapping[str, int]:
        found = await self._kept_answer(
            workspace, ("sizes", location), lambda sdk: _sizes(sdk, location)
        )
        return found or {}

    async def _kept_answer(
        self, workspace: Workspace, what: tuple[str, ...], call: Callable[[Sdk], T]
    ) -> T | None:
        """Return what one request answers, or has answered before; None where there is nothing."""

        async def ask() -> T | None:
            try:
                return await workspace.ask(call, Priority.WRITE)
            except RefusedError as error:
                if error.status != 404:
                    raise
                return None

        return await self._answers.get((workspace.id, workspace.client_id, *what), ask)


def _on_serverless(job: FineTuneJob, gpus: Mapping[str, int]) -> Iterator[Problem]:
    size = job.spec.topology.instance_type or ""
    if size.lower() not in gpus:
        yield Problem(_SIZE_FIELD, f"{size} is no VM size of the workspace's location")
    else:
        yield from _too_few_gpus(job, gpus[size.lower()], size)


def _on_cluster(
    job: FineTuneJob, name: str, compute: Compute, gpus: Mapping[str, int]
) -> Iterator[Problem]:
    topology, capacity = job.spec.topology, job.spec.capacity
    size = topology.instance_type
    if size is not None and size.lower() != compute.size.lower():
        text = f"{size} is not what compute {name} has; it has {compute.size}: remove the field"
        yield Problem(_SIZE_FIELD, text)
    if compute.max_nodes is not None and topology.nodes > compute.max_nodes:
        text = f"{topology.nodes} is more than compute {name} may have: {compute.max_nodes}"
        yield Problem("spec.topology.nodes", text)
    yield from _too_few_gpus(job, gpus.get(compute.size.lower()), f"compute {name}")
    if capacity is Capacity.SPOT and not compute.is_spot:
        text = f"spot is not what compute {name} has, whose nodes are dedicated; use onDemand"
        yield Problem("spec.capacity", text)
    if capacity is Capacity.ON_DEMAND and compute.is_spot:
        text = f"onDemand is not what compute {name} has, whose nodes may be taken away; use spot"
        yield Problem("spec.capacity", text)


def _on_kubernetes(job: FineTuneJob, name: str, compute: Compute) -> Iterator[Problem]:
    topology, names = job.spec.topology, ", ".join(sorted(compute.gpus)) or "none"
    size = topology.instance_type
    if size is None:
        if topology.gpus_per_node > (there := compute.gpus.get(compute.default_type, 0)):
            text = (
                f"is missing, and the default instance type of compute {name} has {there} GPUs; "
                f"name one of its own: {names}"
            )
            yield Problem(_SIZE_FIELD, text)
    elif size not in compute.gpus:
        text = f"{size} is no instance type of compute {name}; name one of its own: {names}"
        yield Problem(_SIZE_FIELD, text)
    else:
        yield from _too_few_gpus(job, compute.gpus[size], f"{size} of compute {name}")


def _too_few_gpus(job: FineTuneJob, there: int | None, where: str) -> Iterator[Problem]:
    asked = job.spec.topology.gpus_per_node
    if there is not None and asked > there:
        text = f"{asked} is more than a node of {where} has: {there}; name another one"
        yield Problem("spec.topology.gpusPerNode", text)


def _compute(found: Any) -> Compute:
    kind = str(found.type).lower()
    if kind == _CLUSTER:
        is_spot = str(found.tier).lower().replace("_", "") == "lowpriority"
        return Compute(kind, found.location, found.size, is_spot, found.max_instances)
    if kind == _KUBERNETES:
        said = found.properties
        types = said.get("instanceTypes") or {}
        gpus = {name: _gpus(one) for name, one in types.items()}
        return Compute(kind, "", gpus=gpus, default_type=said.get("defaultInstanceType") or "")
    return Compute(kind, "")


def _gpus(instance_type: Any) -> int:
    limits = ((instance_type or {}).get("resources") or {}).get("limits") or {}
    return int(limits.get("nvidia.com/gpu") or 0)


def _sizes(sdk: Sdk, location: str) -> dict[str, int]:
    found = sdk.ml.compute.list_sizes(location=location)
    return {one.name.lower(): int(one.gpus or 0) for one in found}


def _cure(error: RefusedError, workspace: Workspace) -> str:
    if error.status == 403:
        return f"give the operator's identity the role AzureML Data Scientist in {_name(workspace)}"
    return "see that the operator's identity and the profile's workspace are right"


def _name(workspace: Workspace) -> str:
    return f"workspace {workspace.id.rpartition('/')[2]}"

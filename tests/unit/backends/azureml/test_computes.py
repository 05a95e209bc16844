"""What Azure is asked about a compute before an attempt is opened, and what is said of it."""

import asyncio
import os
from functools import partial
from typing import Any

import pytest

from azureml_service import WORKSPACE, ServiceClient, amlcompute
from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.azureml.computes import Computes
from finetune_operator.backends.azureml.names import JobProfile
from finetune_operator.backends.azureml.sdk import RefusedError
from finetune_operator.backends.azureml.workspace_client import (
    REQUESTS_PER_SECOND,
    Azure,
    Workspace,
)
from finetune_operator.backends.budget import Budget, Priority
from finetune_operator.backends.response_cache import KEPT_SECONDS, MISSING_SECONDS
from finetune_operator.errors import TransientError
from finetune_operator.testing.suite import Lent
from support.api.builders import job as made_job
from support.azureml.azureml_cases import JOB, profile
from support.azureml.azureml_harness import HastyLoop

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*experimental")

NODES = "spec.topology.nodes"
GPUS = "spec.topology.gpusPerNode"
SIZE = "spec.topology.instanceType"
CAPACITY = "spec.capacity"
COMPUTE = "spec.backend.azureml.compute"
PROFILE = "spec.backend.azureml.profile"
H100, A100 = "Standard_ND96isr_H100_v5", "Standard_NC24ads_A100_v4"


@pytest.fixture(scope="module", autouse=True)
def virtual_machine(stand_in_of_module: ServiceClient) -> None:
    stand_in_of_module.compute("vm", {"computeType": "VirtualMachine", "properties": {}})


class Asked:
    """A process that asks about jobs."""

    def __init__(self, workspace_id: str = WORKSPACE) -> None:
        self._azure = Azure({**os.environ, REQUESTS_PER_SECOND: "100"})
        self._azure.start(Lent())
        self._workspace_id = workspace_id
        self._computes = Computes()

    async def problems(self, client_id: str | None = None, **changes: Any) -> list[str]:
        asked = self._asked(client_id, **changes)
        return [str(one) for one in await self._computes.problems(*asked, Priority.CHECK)]

    async def in_time(self, **changes: Any) -> list[Problem]:
        return await self._computes.problems_in_time(*self._asked(**changes), 20.0)

    async def before_submit(self, **changes: Any) -> None:
        """Submit the job, whose profile may have changed since it was checked."""

        def where(job: FineTuneJob) -> tuple[Workspace, JobProfile]:
            workspace, _, named = self._asked()
            settings = named.settings.model_copy(update=changes)
            return workspace, JobProfile(named.name, named.spec, settings)

        await self._computes.refuse_unchecked(made_job(**JOB).metadata.uid, where)

    def _asked(
        self, client_id: str | None = None, **changes: Any
    ) -> tuple[Workspace, FineTuneJob, JobProfile]:
        spec = profile({"computes": ["*"], "serverless": True})
        assert spec.azureml is not None
        named = JobProfile("default", spec, spec.azureml)
        workspace = self._azure.workspace(self._workspace_id, client_id)
        return workspace, made_job(**{**JOB, **changes}), named


def on(compute: str, **changes: Any) -> dict[str, Any]:
    return {"backend__azureml__compute": compute, **changes}


def serverless(size: str, **changes: Any) -> dict[str, Any]:
    return {"backend__azureml__serverless": True, "topology__instanceType": size, **changes}


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, []),
        (on("cpu-cluster", topology__nodes=4), []),
        (on("cpu-cluster", topology__nodes=5), [(NODES, "5 is more than compute cpu-cluster may")]),
        (on("cpu-cluster", topology__gpusPerNode=1, topology__processesPerNode=None),
         [(GPUS, "1 is more than a node of compute cpu-cluster has: 0")]),
        (on("cpu-cluster", topology__instanceType="Standard_DS3_v2"), []),
        (on("cpu-cluster", topology__instanceType=H100),
         [(SIZE, "is not the size of compute cpu-cluster, which is Standard_DS3_v2")]),
        (on("cpu-cluster", capacity="spot"), [(CAPACITY, "whose nodes are dedicated")]),
        (on("cpu-cluster", capacity="spotPreferred"), []),
        (on("spot-cluster", capacity="spot"), []),
        (on("spot-cluster"), [(CAPACITY, "onDemand is unavailable on compute spot-cluster")]),
        (on("h100-cluster", topology__gpusPerNode=8, topology__processesPerNode=None), []),
        (on("h100-cluster", topology__gpusPerNode=16, topology__processesPerNode=None),
         [(GPUS, "16 is more than a node of compute h100-cluster has: 8")]),
        (on("aks", topology__gpusPerNode=8, topology__processesPerNode=None,
            topology__instanceType="gpu8"), []),
        (on("aks", topology__gpusPerNode=1, topology__processesPerNode=None),
         [(SIZE, "is missing, and the default instance type of compute aks has 0 GPUs; name an")]),
        (on("aks", topology__gpusPerNode=2, topology__processesPerNode=None,
            topology__instanceType="gpu1"), [(GPUS, "2 is more than a node of gpu1 of compute")]),
        (on("aks", topology__instanceType="gpu2"),
         [(SIZE, "is not an instance type of compute aks; use defaultinstancetype, gpu1, gpu8")]),
        (on("nowhere"), [(COMPUTE, "nowhere does not exist in workspace tuning")]),
        (on("vm"), [(COMPUTE, "vm is of type virtualmachine")]),
        (serverless(A100, topology__gpusPerNode=1, topology__processesPerNode=None), []),
        (serverless(A100, topology__gpusPerNode=2, topology__processesPerNode=None),
         [(GPUS, f"2 is more than a node of {A100} has: 1")]),
        (serverless("Standard_Nothing"), [(SIZE, "is not a VM size of the workspace's location")]),
        ({"backend__azureml__environment": "azureml:trainer:9"},
         [("spec.backend.azureml.environment", "azureml:trainer:9 does not exist in workspace")]),
        ({"backend__azureml__environment": "azureml://registries/r/environments/e/versions/1"}, []),
    ],
)  # fmt: skip
def test_what_a_compute_lacks_is_said_with_field_and_remedy(
    stand_in: ServiceClient, changes: dict[str, Any], problems: list[tuple[str, str]]
) -> None:
    found = asyncio.run(Asked().problems(**changes))
    assert len(found) == len(problems), found
    for told, (field, text) in zip(found, problems, strict=True):
        assert told.startswith(f"{field} ")
        assert text in told


def test_a_right_that_is_missing_is_said_with_the_role_that_gives_it(
    stand_in: ServiceClient,
) -> None:
    stand_in.fault("compute.get", status=403)
    (found,) = asyncio.run(Asked().problems())
    assert found.startswith(f"{PROFILE} default cannot be used: Azure ML reports")
    assert "role AzureML Data Scientist in workspace tuning" in found


def test_a_refusal_is_kept_for_seconds_and_of_one_identity(
    stand_in: ServiceClient,
) -> None:
    async def work() -> None:
        asked = Asked()
        stand_in.fault("environment.get", status=403, times=1)
        for _ in range(20):
            (found,) = await asked.problems()
            assert "role AzureML Data Scientist" in found
        assert len(stand_in.requests("environment.get")) == 1
        assert await asked.problems("44444444-4444-4444-4444-444444444444") == []
        await asyncio.sleep(MISSING_SECONDS + 1)
        assert await asked.problems() == []

    with asyncio.Runner(loop_factory=HastyLoop) as runner:
        runner.run(work())


def test_what_may_pass_is_asked_again_at_once(stand_in: ServiceClient) -> None:
    async def work() -> None:
        asked = Asked()
        stand_in.fault("environment.get", status=503, times=1)
        with pytest.raises(TransientError):
            await asked.problems()
        assert await asked.problems() == []

    asyncio.run(work())


def test_a_workspace_that_does_not_exist_is_no_fault_of_the_compute(
    stand_in: ServiceClient,
) -> None:
    (found,) = asyncio.run(Asked(WORKSPACE + "-gone").problems())
    assert found.startswith(f"{PROFILE} default cannot be used: Azure ML reports")
    assert "check the operator's identity and the profile's workspace" in found


def test_answers_are_kept_for_minutes_and_what_is_missing_for_seconds(
    stand_in: ServiceClient,
) -> None:
    async def work() -> None:
        asked, loop = Asked(), asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(asked.problems() for _ in range(20)))
        kinds = [one.kind for one in stand_in.requests(forget=True) if one.kind != "token"]
        assert sorted(kinds) == ["compute.get", "environment.get", "sizes.list"]
        (missing,) = await asked.problems(**on("later"))
        assert "later does not exist" in missing
        stand_in.compute("later", amlcompute("Standard_DS3_v2"))
        await asyncio.sleep(MISSING_SECONDS + 1)
        assert await asked.problems(**on("later")) == []
        stand_in.compute("later", amlcompute("Standard_DS3_v2", is_low_priority=True))
        assert loop.time() - began < KEPT_SECONDS
        assert await asked.problems(**on("later")) == []
        await asyncio.sleep(KEPT_SECONDS)
        assert await asked.problems(**on("later")) == []  # which has it renewed
        stand_in.requests(forget=True)
        while not stand_in.requests("sizes.list"):
            await asyncio.sleep(1)
        (changed,) = await asked.problems(**on("later"))
        assert "may be preempted; use spot" in changed

    with asyncio.Runner(loop_factory=partial(HastyLoop, 100.0)) as runner:
        runner.run(work())


@pytest.mark.parametrize(
    ("compute", "problem"), [("spot-cluster", "may be preempted; use spot"), ("cpu-cluster", "")]
)
def test_what_could_not_be_asked_is_asked_again_before_the_job_is_submitted(
    stand_in: ServiceClient, compute: str, problem: str
) -> None:
    async def work() -> None:
        asked = Asked()
        stand_in.fault("compute.get", status=429, times=1)
        assert await asked.in_time(**on(compute)) == []
        if problem:
            with pytest.raises(RefusedError, match=problem) as refused:
                await asked.before_submit()
            assert not refused.value.retryable, "the job is stalled"
        else:
            await asked.before_submit()
            stand_in.requests(forget=True)
            await asked.before_submit()
            assert stand_in.requests() == []

    asyncio.run(work())


def test_what_could_not_be_asked_is_judged_by_the_profile_as_it_is_at_the_submission(
    stand_in: ServiceClient,
) -> None:
    async def work() -> None:
        asked = Asked()
        stand_in.fault("environment.get", status=503, times=1)
        assert await asked.in_time() == []
        with pytest.raises(RefusedError, match="nothing:1 does not exist"):
            await asked.before_submit(environment="azureml:nothing:1")
        await asked.before_submit()

    asyncio.run(work())


class Recording(Workspace):
    """A workspace without responses that records the priority of each request."""

    def __init__(self) -> None:
        super().__init__(Azure({}), WORKSPACE, None, Budget(100.0, 1))
        self.priorities: list[Priority] = []

    async def ask(self, call: Any, priority: Priority) -> Any:
        self.priorities.append(priority)
        raise TransientError("no response")


def test_only_the_requests_of_a_submit_are_as_urgent_as_a_submit() -> None:
    spec = profile({"computes": ["*"]})
    assert spec.azureml is not None
    job, named = made_job(**JOB), JobProfile("default", spec, spec.azureml)
    workspace, computes = Recording(), Computes()

    async def work() -> None:
        assert await computes.problems_in_time(workspace, job, named, 20.0) == []
        with pytest.raises(TransientError):
            await computes.refuse_unchecked(job.metadata.uid, lambda job: (workspace, named))

    asyncio.run(work())
    assert workspace.priorities == [Priority.CHECK, Priority.WRITE]

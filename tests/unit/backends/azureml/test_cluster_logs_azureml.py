"""`ftctl logs` of an azureml job in a cluster: its profile is read there, or given."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from azureml_service import ServiceClient
from finetune_operator.api.crd import custom_resource_definition, profile_definition
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneProfile
from finetune_operator.backends.azureml.backend import AzureMLBackend
from finetune_operator.backends.base import Attempt, BackendContext
from finetune_operator.cli.cluster_logs import cluster_for
from finetune_operator.embedded.server import EmbeddedApi
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import FINE_TUNE_JOBS, FINE_TUNE_PROFILES, Object
from finetune_operator.planner.plan import make_plan
from finetune_operator.testing.suite import Lent
from support.api.builders import manifest
from support.azureml.azureml_cases import ALLOW, JOB, SETTINGS
from support.kernel.fake_api import FakeApi
from support.kernel.virtual_time import run

pytest.importorskip("azure.core.exceptions", reason="needs the extra azureml")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*experimental")

PROFILE: Object = {
    "apiVersion": FINE_TUNE_PROFILES.api_version,
    "kind": FINE_TUNE_PROFILES.kind,
    "metadata": {"name": "default"},
    "spec": {"azureml": dict(SETTINGS), "allow": dict(ALLOW)},
}
GIVEN = {"default": FineTuneProfile.model_validate(PROFILE)}
NONE: Mapping[str, FineTuneProfile] = {}


async def submitted(made: Object) -> str:
    """Submit the first attempt of a job as the operator does; return its name on Azure ML."""
    backend = AzureMLBackend(BackendContext(Path(), dict(os.environ), profiles=GIVEN))
    await backend.start(Lent())
    try:
        plan = make_plan(FineTuneJob.model_validate(made))
        handle = await backend.submit(backend.render(plan, Attempt(1)))
    finally:
        await backend.close()
    return handle.name.rpartition("/")[2]


async def ftctl(*arguments: str, kubeconfig: Path) -> tuple[int | None, str]:
    """Return the exit code and what the command prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "finetune_operator", *arguments),
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode, said.decode()


@pytest.mark.full
def test_the_log_of_a_job_in_a_cluster_is_read_with_its_profile(
    stand_in: ServiceClient, tmp_path: Path
) -> None:
    kubeconfig, file = tmp_path / "kubeconfig", tmp_path / "profile.yaml"
    file.write_text(json.dumps(PROFILE))

    async def work() -> None:
        async with EmbeddedApi([custom_resource_definition(), profile_definition()]) as api:
            kubeconfig.write_text(json.dumps(api.kubeconfig()))
            async with await HttpClient.connect(str(kubeconfig)) as client:
                made = await client.create(FINE_TUNE_JOBS, manifest(**JOB), "default")
                opened = {"number": 1, "startTime": made["metadata"]["creationTimestamp"]}
                change = {"status": {"attempt": 1, "attempts": [opened]}}
                await client.patch(FINE_TUNE_JOBS, "tiny", "default", change, subresource="status")
                stand_in.set_log(await submitted(made), "step 1\nstep 2\n")
                asked = ("logs", "tiny", "-n", "default")
                given = (*asked, "--profile", str(file))
                assert await ftctl(*given, kubeconfig=kubeconfig) == (0, "step 1\nstep 2\n")
                await client.create(FINE_TUNE_PROFILES, PROFILE)
                assert await ftctl(*asked, kubeconfig=kubeconfig) == (0, "step 1\nstep 2\n")

    asyncio.run(work())


def test_without_the_right_to_read_profiles_the_users_own_serve() -> None:
    async def work() -> None:
        api = FakeApi()
        api.refused[FINE_TUNE_PROFILES, None] = ["list"]
        with pytest.raises(FineTuneError, match=r"finetuneprofiles .* --profile FILE"):
            await cluster_for(AzureMLBackend, api, NONE)
        cluster = await cluster_for(AzureMLBackend, api, GIVEN)
        assert [one["metadata"]["name"] for one in cluster.cache(FINE_TUNE_PROFILES)] == ["default"]

    run(work())


def test_a_profile_that_is_given_counts_more_than_the_clusters() -> None:
    async def work() -> None:
        api = FakeApi()
        await api.create(FINE_TUNE_PROFILES, {**PROFILE, "spec": {"azureml": {}}})
        other = {"metadata": {"name": "other"}, "spec": PROFILE["spec"]}
        await api.create(FINE_TUNE_PROFILES, other)
        cluster = await cluster_for(AzureMLBackend, api, GIVEN)
        specs = {one["metadata"]["name"]: one["spec"] for one in cluster.cache(FINE_TUNE_PROFILES)}
        assert sorted(specs) == ["default", "other"]
        assert specs["default"]["azureml"]["workspace"] == SETTINGS["workspace"]

    run(work())

"""What the azureml backend asks Azure ML for, counted on its stand-in."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from azureml_service import ServiceClient
from finetune_operator.kube.api_errors import InvalidError
from finetune_operator.kube.resources import FINE_TUNE_PROFILES
from finetune_operator.testing.suite import Submitted, job_of, started, submitted
from finetune_trainer.config import HEARD_TAG, Heard
from support.azureml.azureml_cases import profile
from support.azureml.azureml_harness import AzureMLHarness
from support.cluster.clusters import embedded_cluster
from support.cluster.operators import OperatorProcess, open_api, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*experimental")


@pytest.fixture
def harness(stand_in: ServiceClient) -> AzureMLHarness:
    stand_in.settings(first_state="NotStarted", cancel="sigterm")
    return AzureMLHarness(stand_in)


class Watched:
    """An attempt, and how often Azure ML is asked about it."""

    def __init__(self, attempt: Submitted, harness: AzureMLHarness) -> None:
        self._attempt, self._harness = attempt, harness

    async def requests_in(self, seconds: float) -> int:
        """Return how many came in a time in which the operator observes it every second."""
        before, loop = self._harness.num_requests(), asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            await self._attempt.observe()
            await asyncio.sleep(1.0)
        return self._harness.num_requests() - before


def test_a_stop_is_the_tag_and_one_cancel_however_often_it_is_asked_for(
    harness: AzureMLHarness, stand_in: ServiceClient
) -> None:
    stand_in.settings(first_state="Running", cancel="unheard")

    async def work() -> None:
        async with submitted(harness) as attempt:
            before, until = harness.num_writes(), datetime.now(UTC)
            for _ in range(3):
                assert await attempt.backend.cancel(attempt.ref, until)
            assert harness.num_writes() - before == 2

    harness.run(work())


def test_a_trainer_that_listens_is_cancelled_when_its_time_is_up(
    harness: AzureMLHarness, stand_in: ServiceClient
) -> None:
    stand_in.settings(first_state="Running", cancel="unheard")

    async def work() -> None:
        async with submitted(harness) as attempt:
            heard = Heard(time=time.time()).model_dump_json(exclude_none=True)
            stand_in.log_batch(stand_in.jobs()[-1].name, tags={HEARD_TAG: heard})
            await Watched(attempt, harness).requests_in(35)
            left = timedelta(seconds=60)
            before, until = harness.num_writes(), datetime.now(UTC) + left
            for _ in range(3):
                assert await attempt.backend.cancel(attempt.ref, until)
            assert harness.num_writes() - before == 1
            harness.ahead = left
            for _ in range(3):
                assert await attempt.backend.cancel(attempt.ref, until)
            assert harness.num_writes() - before == 2

    harness.run(work())


def test_a_compute_is_asked_for_once_for_many_jobs(
    harness: AzureMLHarness, stand_in: ServiceClient
) -> None:
    async def work() -> None:
        async with started(harness) as (backend, _):
            stand_in.requests(forget=True)
            for _ in range(3):
                assert not await asyncio.to_thread(backend.check_inputs, job_of(harness))
        kinds = [one.kind for one in stand_in.requests() if one.kind != "token"]
        assert sorted(kinds) == ["compute.get", "environment.get", "sizes.list"]

    harness.run(work())


def test_the_sdk_is_imported_for_the_first_job_of_azure_ml_and_a_submit_is_two_requests(
    stand_in: ServiceClient, tmp_path: Path
) -> None:
    stand_in.requests(forget=True)
    with (
        embedded_cluster(tmp_path) as cluster,
        open_api(cluster.kubeconfig) as api,
        api.profile("default", profile()),
        api.namespace("sdk") as namespace,
        OperatorProcess(
            cluster.kubeconfig,
            namespace,
            environ={**stand_in.environ(), "PYTHONPROFILEIMPORTTIME": "1"},
        ) as operator,
    ):

        def imported() -> set[str]:
            said = (line["message"].split("|") for line in operator.lines)
            return {parts[-1].strip().split(".")[0] for parts in said if len(parts) == 3}

        api.apply(namespace, "other")
        wait_until(lambda: api.attempts(namespace), 30)
        assert "finetune_operator" in imported()
        assert "azure" not in imported()
        api.apply(namespace, "ours", backend={"type": "azureml"})
        asked = wait_until(lambda: stand_in.requests("job.put"), 60)
        assert "azure" in imported()
        name = asked[0].name
        kinds = [one.kind for one in stand_in.requests() if one.name == name]
        assert kinds[:2] == ["job.get", "job.put"]
        assert [kind for kind in kinds if kind not in ("job.get", "run.details")] == ["job.put"]


@pytest.mark.parametrize("field", ["workspace", "datastore"])
def test_a_profile_keeps_the_place_where_runs_and_checkpoints_are_looked_for(
    tmp_path: Path, field: str
) -> None:
    with (
        embedded_cluster(tmp_path) as cluster,
        open_api(cluster.kubeconfig) as api,
        api.profile("default", profile()),
    ):
        change = {"spec": {"azureml": {field: "another"}}}
        refused = f"spec.azureml.{field}: .*cannot change, because jobs"
        with pytest.raises(InvalidError, match=refused):
            api.run(api.client.patch(FINE_TUNE_PROFILES, "default", None, change))

"""The azureml backend keeps the contract, on Azure ML's stand-in."""

from dataclasses import replace

import pytest

from azureml_service import ServiceClient
from finetune_operator.testing.service_suite import ServiceSuite
from finetune_operator.testing.suite import on_one_loop, started, submitted
from support.azureml.azureml_harness import AzureMLHarness

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*experimental")


@pytest.fixture
def harness(stand_in: ServiceClient) -> AzureMLHarness:
    return AzureMLHarness(stand_in)


class TestAzureMLBackend(ServiceSuite):
    """The suite; its harness is the fixture of this file."""

    @on_one_loop
    async def test_a_cancel_of_a_new_process_waits_for_no_look(
        self, harness: AzureMLHarness
    ) -> None:
        async with submitted(harness) as first:
            pass
        async with started(harness) as (backend, lent):
            attempt = replace(first, backend=backend, lent=lent)
            assert await attempt.cancel()
            asked = harness.num_requests()
            for _ in range(5):
                assert await attempt.cancel()
            assert harness.num_requests() <= asked + 2  # of the first look
        assert harness.num_writes() == 3  # the job, its tag and its cancel

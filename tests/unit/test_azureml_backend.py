"""The azureml backend keeps the contract, on Azure ML's stand-in."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from azureml_harness import AzureMLHarness
from azureml_service import ServiceClient, running_service
from finetune_operator.backends.azureml import sdk
from finetune_operator.testing.service_suite import ServiceSuite
from finetune_operator.testing.suite import on_one_loop, started, submitted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*experimental")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    sdk.load()  # which takes longer than the clock of the tests allows
    with running_service(tmp_path_factory.mktemp("azure")) as made:
        yield made


@pytest.fixture
def harness(service: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> AzureMLHarness:
    for name, value in service.environ().items():
        monkeypatch.setenv(name, value)
    service.clear_faults()
    return AzureMLHarness(service)


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

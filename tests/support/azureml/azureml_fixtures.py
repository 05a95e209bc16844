"""Fixtures for tests in whose process the SDK talks to the stand-in for Azure ML."""

from collections.abc import Iterator

import pytest

from azureml_service import ServiceClient, running_service
from finetune_operator.backends.azureml import sdk


@pytest.fixture(scope="module")
def stand_in_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    """The stand-in that all tests of a module share, with what they have left there."""
    sdk.load()  # which takes longer than the hurried clock of some tests allows
    with running_service(tmp_path_factory.mktemp("azure")) as service:
        yield service


@pytest.fixture
def stand_in(stand_in_of_module: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> ServiceClient:
    """The stand-in without faults or requests so far; this process is told where it is."""
    for name, value in stand_in_of_module.environ().items():
        monkeypatch.setenv(name, value)
    stand_in_of_module.clear_faults()
    stand_in_of_module.requests(forget=True)
    return stand_in_of_module

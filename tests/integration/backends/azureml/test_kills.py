"""A short series of random lives on the stand-in for Azure ML, while the operator is killed.

`make azureml-lives` runs a long series on the embedded API server.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.azureml.azureml_cases import profile
from support.azureml.azureml_lives import lived
from support.cluster.operators import Api

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

JOBS = 12
KILLS = 5


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    with api.profile("default", profile()), api.namespace("azureml") as name:
        yield name


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_no_attempt_is_created_twice_or_orphaned_while_the_operator_is_killed_repeatedly(
    api: Api, namespace: str, tmp_path: Path
) -> None:
    faults, told = asyncio.run(lived(api, namespace, tmp_path, seed=0, jobs=JOBS, deaths=KILLS))
    assert not faults, told

"""Lives of jobs on the stand-in for Azure ML, while the operator's process is killed at random."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.azureml.azureml_cases import profile
from support.azureml.azureml_lives import lived
from support.cluster.operators import Api

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

JOBS = 20
KILLS = 10


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    with api.profile("default", profile()), api.namespace("azureml") as name:
        yield name


def test_no_attempt_is_made_twice_or_left_though_the_operator_is_killed_again_and_again(
    api: Api, namespace: str, tmp_path: Path
) -> None:
    faults, told = asyncio.run(lived(api, namespace, tmp_path, seed=0, jobs=JOBS, deaths=KILLS))
    assert not faults, told

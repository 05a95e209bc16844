"""Faults in virtual time: the status is true, and no job restarts without a cause."""

from collections.abc import Callable

import pytest

from support.chaos.case import Case
from support.chaos.life import play
from support.chaos.played_cluster import PlayedCluster
from support.chaos.played_workspace import PlayedWorkspace
from support.chaos.table import CASES, RECORD
from support.kernel.virtual_time import run

WORLDS: dict[str, type[PlayedCluster] | type[PlayedWorkspace]] = {
    "kubernetes": PlayedCluster,
    "azureml": PlayedWorkspace,
}
PLAYED = [one for one in CASES if one.inject and not one.not_run]


@pytest.mark.parametrize("case", PLAYED, ids=lambda case: case.slug)
def test_the_status_names_the_fault(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    async def life() -> None:
        async with WORLDS[case.backend].running() as world:
            outcome = await play(case, world)
            record_property(RECORD, outcome.as_dict())

    run(life())

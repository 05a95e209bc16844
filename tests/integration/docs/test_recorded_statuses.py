"""tests/statuses.yaml, by which GitOps tools are judged, is what the operator writes today."""

from typing import Any

import pytest
import yaml

from finetune_operator.kube.resources import Object
from support.cluster.operators import Api
from support.reconcile.recorded_statuses import FILE, record

# On the embedded server alone, because `make statuses` records them on a real one.
pytestmark = [
    pytest.mark.full,
    pytest.mark.parametrize("cluster", ["embedded"], indirect=True),
]


def gist(recorded: dict[str, Object]) -> dict[str, Any]:
    """Return what tools judge by; on a busy machine a sentence may be an earlier one."""
    return {
        what: {
            **made,
            "status": {
                **made["status"],
                "conditions": [
                    (one["type"], one["status"], one["reason"])
                    for one in made["status"]["conditions"]
                ],
            },
        }
        for what, made in recorded.items()
    }


def test_recorded_statuses_are_those_of_the_operator(api: Api) -> None:
    with api.namespace("statuses") as namespace:
        found = record(api, namespace)

    committed = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert gist(found) == gist(committed), "run: make statuses"

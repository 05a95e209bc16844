"""What the chart makes for a Prometheus passes a real API server under strict validation.

Each object is sent with dryRun, so nothing stays but the definitions, which are deleted.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest

from support.charts.helm_chart import Json, needs_helm, rendered
from support.charts.monitoring_kinds import GROUPS, definitions
from support.cluster.operators import KUBECONFIG
from support.cluster.plain_api import CRDS, JSON, Answer, PlainApi

pytestmark = [pytest.mark.cluster, needs_helm]
BOTH = sorted(GROUPS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainApi]:
    """A real API server that knows the kinds of both groups."""
    if KUBECONFIG is None:
        pytest.skip("FINETUNE_TEST_KUBECONFIG names no cluster")
    made = PlainApi(KUBECONFIG)
    crds = definitions(tmp_path_factory.mktemp("npm"))
    names = [one["metadata"]["name"] for one in crds]
    for name, crd in zip(names, crds, strict=True):
        made.define(name, json.dumps(crd))
    for name in names:
        while made.send("GET", _path(name.split(".")[0], name.split(".", 1)[1])).status != 200:
            pass
    yield made
    for name in names:
        made.send("DELETE", f"{CRDS}/{name}")


def _path(plural: str, group: str) -> str:
    return f"/apis/{group}/v1/namespaces/default/{plural}"


def create(server: PlainApi, made: Json) -> Answer:
    moved = {**made, "metadata": {**made["metadata"], "namespace": "default"}}
    path = _path(f"{made['kind'].lower()}s", made["apiVersion"].split("/")[0])
    return server.send(
        "POST", path, json.dumps(moved), JSON, dryRun="All", fieldValidation="Strict"
    )


def monitoring(group: str) -> list[Json]:
    """Return what the chart makes in that group, with every value set."""
    on: Json = {"create": True, "labels": {"release": "stack"}}
    values = {"group": group, "monitors": {**on, "namespaces": ["team-a"]}}
    if "PrometheusRule" in GROUPS[group]:
        values["rules"] = on
    return [one for one in rendered(monitoring=values) if one["apiVersion"].startswith(group)]


@pytest.mark.parametrize("group", BOTH)
def test_everything_of_a_group_is_accepted(server: PlainApi, group: str) -> None:
    made = monitoring(group)

    assert {one["kind"] for one in made} == set(GROUPS[group])
    for one in made:
        answer = create(server, one)
        assert answer.is_accepted, answer.message
        assert answer.warning is None


@pytest.mark.parametrize("group", BOTH)
def test_misspelt_field_of_a_monitor_is_refused(server: PlainApi, group: str) -> None:
    monitor = deepcopy(next(one for one in monitoring(group) if one["kind"] == "PodMonitor"))
    monitor["spec"]["podMetricsEndpoints"][0]["honourLabels"] = True

    answer = create(server, monitor)

    assert answer.status == 400
    assert "honourLabels" in answer.message


def test_monitor_is_refused_where_its_kind_is_not_known(server: PlainApi, tmp_path: Path) -> None:
    (monitor,) = [one for one in monitoring(BOTH[0]) if one["kind"] == "PodMonitor"]

    answer = create(server, {**monitor, "apiVersion": "monitoring.example.com/v1"})

    assert answer.status == 404

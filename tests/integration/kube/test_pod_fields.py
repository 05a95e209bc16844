"""Fields of pods in jobs and profiles on a real API server, with and without the previous CRD."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from finetune_operator.kube.api_errors import InvalidError
from finetune_operator.kube.client import Call
from finetune_operator.kube.resources import (
    CRDS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    Object,
    Resource,
)
from support.api.builders import manifest
from support.cluster.last_release import definitions
from support.cluster.operators import Api, wait_until

pytestmark = pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
REFUSED = "cannot be set by a job; remove it"
TERM = {
    "topologyKey": "zone",
    "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]},
    "namespaceSelector": {"matchLabels": {"a": "b"}},
    "namespaces": ["a"],
    "matchLabelKeys": ["a"],
    "mismatchLabelKeys": ["b"],
}
NODE = {
    "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}],
    "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}],
}
ALL_FIELDS: dict[str, Any] = {
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [NODE]},
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": NODE}],
        },
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [TERM],
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": TERM}
            ],
        },
    },
    "tolerations": [
        {
            "key": "a",
            "operator": "Equal",
            "value": "b",
            "effect": "NoExecute",
            "tolerationSeconds": 3600,
        }
    ],
    "volumes": [{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
    "imagePullSecrets": [{"name": "s"}],
    "nodeSelector": {"a": "b"},
    "containers": [
        {
            "name": "trainer",
            "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "resources": {"requests": {"cpu": 2, "memory": "1Gi"}},
            "volumeMounts": [{"name": "v", "mountPath": "/extra/v", "subPath": "s"}],
        }
    ],
}


def variables(count: int) -> Object:
    env = [{"name": f"V{number}", "value": "v"} for number in range(count)]
    return {"containers": [{"name": "trainer", "env": env}]}


def job(name: str, spec: Object) -> Object:
    obj = manifest(
        name=name, model__source="hf://a/b", dataset__source="hf://a/c", podTemplate={"spec": spec}
    )
    return {**obj, "metadata": {"name": name}}


def create(api: Api, resource: Resource, obj: Object, namespace: str | None = None) -> Object:
    """Create an object without strict validation, as most clients do."""
    call = Call("create", resource, resource.path(namespace), {}, orjson.dumps(obj))
    return api.run(api.client.exchange(call))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param({"hostNetwork": True}, REFUSED, id="host network"),
        pytest.param({"securityContext": {"runAsUser": 0}}, REFUSED, id="security context"),
        pytest.param({"initContainers": [{"name": "i"}]}, REFUSED, id="init container"),
        pytest.param({"containers": [{"name": "trainer", "image": "i"}]}, REFUSED, id="image"),
        pytest.param(variables(65), "must have at most 64 items", id="65 variables"),
        pytest.param(
            {"containers": [{"name": "trainer", "resources": {"limits": {"cpu": 1.5}}}]},
            "resources.limits.cpu: Invalid value",
            id="float as quantity",
        ),
        pytest.param(
            {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
            "must be either emptyDir or persistentVolumeClaim",
            id="host path",
        ),
    ],
)
def test_refused_fields_are_an_error_for_clients_without_strict_validation(
    api: Api, spec: Object, message: str
) -> None:
    with api.namespace("refused") as namespace:
        with pytest.raises(InvalidError) as caught:
            create(api, FINE_TUNE_JOBS, job("a", spec), namespace)
        assert message in caught.value.message


def test_all_fields_of_affinity_tolerations_and_volumes_are_stored(api: Api) -> None:
    with api.namespace("whole") as namespace:
        stored = create(api, FINE_TUNE_JOBS, job("a", ALL_FIELDS), namespace)
        assert stored["spec"]["podTemplate"]["spec"] == ALL_FIELDS


def test_sources_of_volumes_in_a_profile_are_stored_and_unknown_ones_dropped(api: Api) -> None:
    csi = {"driver": "d", "volumeAttributes": {"a": "b"}, "nodePublishSecretRef": {"name": "s"}}
    deep: Object = {}
    for _ in range(50):
        deep = {"a": deep}
    volumes = [
        {"name": "csi", "mountPath": "/csi", "source": {"csi": csi}},
        {"name": "deep", "mountPath": "/deep", "source": {"unknown": deep}},
    ]
    profile = {
        "apiVersion": FINE_TUNE_PROFILES.api_version,
        "kind": FINE_TUNE_PROFILES.kind,
        "metadata": {"name": "sources"},
        "spec": {"image": "registry.example/image:1", "volumes": volumes},
    }
    stored = create(api, FINE_TUNE_PROFILES, profile)
    api.run(api.client.delete(FINE_TUNE_PROFILES, "sources"))
    assert [volume["source"] for volume in stored["spec"]["volumes"]] == [{"csi": csi}, {}]


@pytest.fixture
def stored(api: Api) -> Iterator[str]:
    """Store jobs under the definitions of the last release, and install the new definitions."""
    with api.namespace("stored") as namespace:
        for definition in definitions():
            install(api, definition)
        two = [{"name": "trainer"}, {"name": "other"}]
        wait_until(lambda: keeps_unknown(api, namespace), 20, "the previous definition")
        specs = {
            "whole": ALL_FIELDS,
            "many": variables(65),
            "host": {"hostNetwork": True},
            "two": {"containers": two},
            "unknown": {"affinity": {"newAffinity": {"a": 1}}},
            "float": {"containers": [{"name": "trainer", "resources": {"limits": {"cpu": 1.5}}}]},
            "text": {"tolerations": "none"},
            "number": {"nodeSelector": {"a": 1}, "affinity": [{}]},
        }
        for name, spec in specs.items():
            create(api, FINE_TUNE_JOBS, job(name, spec), namespace)
        api.install_crds()
        wait_until(lambda: not keeps_unknown(api, namespace), 20, "the new definition")
        yield namespace
        for name in specs:
            api.delete(namespace, name)


def install(api: Api, definition: Object) -> None:
    there = api.run(api.client.get(CRDS, definition["metadata"]["name"]))
    version = {"resourceVersion": there["metadata"]["resourceVersion"]}
    replaced = {**definition, "metadata": {**definition["metadata"], **version}}
    api.run(api.client.replace(CRDS, replaced))


def keeps_unknown(api: Api, namespace: str) -> bool:
    probe = job("probe", {"affinity": {"unknown": {}}})
    call = Call(
        "create",
        FINE_TUNE_JOBS,
        FINE_TUNE_JOBS.path(namespace),
        {"dryRun": "All"},
        orjson.dumps(probe),
    )
    stored = api.run(api.client.exchange(call))
    return bool(stored["spec"]["podTemplate"]["spec"]["affinity"])


def test_jobs_stored_under_the_previous_definition_are_listed_and_take_status_patches(
    api: Api, stored: str
) -> None:
    listed = api.run(api.client.list(FINE_TUNE_JOBS, stored)).items
    pods = {one["metadata"]["name"]: one["spec"]["podTemplate"]["spec"] for one in listed}
    assert pods["whole"] == ALL_FIELDS
    assert pods["many"] == variables(65)
    status = {"status": {"phase": "Running"}}
    for name in sorted(pods):
        patched = api.client.patch(FINE_TUNE_JOBS, name, stored, status, subresource="status")
        assert api.run(patched)["status"]["phase"] == "Running"

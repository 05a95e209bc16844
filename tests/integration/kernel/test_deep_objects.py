"""Objects that are nested deeper than any decoder reads, beside jobs of others."""

import json

import pytest

from finetune_operator.kube.client import Call
from finetune_operator.kube.decoding import CUT, MAX_DEPTH
from finetune_operator.kube.labels import JOB_LABEL, JOB_UID_LABEL
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, Object, Resource
from support.api.builders import manifest
from support.cluster.operators import Api, OperatorProcess, wait_until


def send_deep(api: Api, resource: Resource, namespace: str, obj: Object, levels: int) -> None:
    """Create an object whose managedFields end at that level of the object."""
    inner = levels - 5  # the object, metadata, managedFields, the entry, and the innermost object
    owner = {"manager": "m", "operation": "Update", "apiVersion": resource.api_version}
    fields = [{**owner, "fieldsType": "FieldsV1", "fieldsV1": "FIELDS"}]
    named = {"apiVersion": resource.api_version, "kind": resource.kind, **obj}
    text = json.dumps({**named, "metadata": {**obj["metadata"], "managedFields": fields}})
    text = text.replace('"FIELDS"', '{"f:a":' * inner + "{}" + "}" * inner)
    call = Call("create", resource, resource.path(namespace), {}, text.encode())
    created = api.run(api.client.exchange(call))
    assert (CUT in str(created)) == (levels > MAX_DEPTH)


def deep_job(api: Api, namespace: str, name: str, levels: int) -> None:
    fields: Object = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
    job = manifest(name=name, backend={"type": "configmap"}, **fields)
    job["metadata"] = {"name": name}
    send_deep(api, FINE_TUNE_JOBS, namespace, job, levels)


def labelled(name: str) -> Object:
    labels = {JOB_LABEL: "other", JOB_UID_LABEL: "none"}
    return {"metadata": {"name": name, "labels": labels}, "data": {}}


DEPTHS = (100, 101, 253, 256, 700, 985, 1025, 5000)
"""Around the limits of orjson's encoder and decoder, and of Python's."""


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_objects_nested_deeper_than_decoders_read_stop_no_other_job(api: Api) -> None:
    with api.namespace("deep") as namespace:
        with OperatorProcess(api.kubeconfig, namespace) as operator:
            operator.wait_for("synced", 60)
            for levels in DEPTHS:  # by events
                deep_job(api, namespace, f"deep-{levels}", levels)
                send_deep(api, CONFIG_MAPS, namespace, labelled(f"deep-{levels}"), levels)
            starts(api, namespace, "after-events")
        with OperatorProcess(api.kubeconfig, namespace) as operator:
            operator.wait_for("synced", 60)  # by lists
            starts(api, namespace, "after-lists")
            starts_all(api, namespace)
            assert operator.said("watch broke") == []
            assert operator.said("kopf failed") == []
            assert operator.said("kopf ended; it starts again") == []


def starts(api: Api, namespace: str, name: str) -> None:
    api.apply(namespace, name)
    wait_until(lambda: f"{name}-1" in attempts(api, namespace), 20, f"{name} has an attempt")


def starts_all(api: Api, namespace: str) -> None:
    names = {f"deep-{levels}-1" for levels in DEPTHS}
    wait_until(lambda: names <= attempts(api, namespace), 20, "every deep job has an attempt")


def attempts(api: Api, namespace: str) -> set[str]:
    return set(api.attempts(namespace))

"""The CRD on an API server, and the proof that the checks made without one agree with it.

Objects are sent as the text of the file with fieldValidation=Strict and dryRun, so nothing is left
behind but the CRD.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_operator.api.crd import crd_yaml, custom_resource_definition, job_schema
from finetune_operator.api.manifest import read_manifests
from finetune_operator.api.openapi import Schema
from finetune_operator.api.paths import FieldPath, Finding, show_path
from finetune_operator.api.problems import Severity
from finetune_operator.api.validation import check_manifest, check_object, defaulted
from support.api import backend_names
from support.api.bad_manifests import BadManifest, bad_manifests
from support.api.builders import manifest
from support.cluster.clusters import RunningCluster
from support.cluster.plain_api import CRDS, JSON, Answer, PlainApi

EXAMPLES = Path(__file__).parents[3] / "examples"
DRY = {"dryRun": "All"}
JOBS = "/apis/finetune.dev/v1alpha1/namespaces/default/finetunejobs"


class ApiServer(PlainApi):
    """With our jobs."""

    def create(self, text: str, kind: str = "application/yaml", **query: str) -> Answer:
        return self.send("POST", JOBS, text, kind, fieldValidation="Strict", **query)

    def update(self, name: str, value: dict[str, Any], **query: str) -> Answer:
        path = f"{JOBS}/{name}"
        version = self.send("GET", path).body["metadata"]["resourceVersion"]
        metadata = value["metadata"] | {"resourceVersion": version}
        text = json.dumps(value | {"metadata": metadata})
        return self.send("PUT", path, text, JSON, fieldValidation="Strict", **query)


@pytest.fixture(scope="module")
def server(cluster: RunningCluster) -> ApiServer:
    made = ApiServer(cluster.kubeconfig)
    made.define("finetunejobs.finetune.dev", crd_yaml(custom_resource_definition()))
    while made.send("GET", JOBS).status != 200:
        pass
    return made


@pytest.fixture
def stored(server: ApiServer) -> Iterator[str]:
    """The name of a job that is really stored."""
    name = "stored"
    answer = server.create(json.dumps(manifest(name=name)), JSON)
    assert answer.is_accepted, answer.message
    yield name
    server.send("DELETE", f"{JOBS}/{name}")


def test_the_crd_installs_with_what_kubectl_needs(server: ApiServer) -> None:
    crd = server.send("GET", f"{CRDS}/finetunejobs.finetune.dev").body
    assert crd["status"]["acceptedNames"]["shortNames"] == ["ftj"]
    assert crd["status"]["storedVersions"] == ["v1alpha1"]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_example_is_accepted(server: ApiServer, file: Path) -> None:
    documents = file.read_text().split("\n---\n")  # as kubectl sends them, numbers as written
    (job,) = [one for one in documents if "kind: FineTuneJob\n" in one]
    answer = server.create(job, **DRY)
    assert answer.is_accepted, answer.message
    assert answer.warning is None


@pytest.mark.parametrize("bad", bad_manifests(), ids=lambda bad: bad.file.stem)
def test_a_bad_manifest_is_refused_here_and_offline(server: ApiServer, bad: BadManifest) -> None:
    answer = server.create(bad.file.read_text(), **DRY)
    assert answer.status in (400, 422), answer
    # of a label the server names only the map, of an unknown version the first unknown field
    if bad.path not in ("metadata.labels.train", "apiVersion"):
        assert bad.path.split(".")[-1] in answer.message
    reading = read_manifests([str(bad.file)])
    offline = [one for one in reading.problems if one.severity is Severity.ERROR]
    for read in reading.manifests:
        offline += check_manifest(read, with_unbuilt=False)
    assert [bad.says in one.message for one in offline] == [True]


# One construct of the models each: a value that fits it, and one that does not.
CONSTRUCTS = [
    pytest.param("model.baseName", "x", "", id="text with a shortest length"),
    pytest.param("model.baseName", "é" * 512, "é" * 513, id="text with a longest length"),
    pytest.param("backend.type", "my-plugin", "My_Plugin", id="text with a pattern"),
    pytest.param("strategy.type", "zero3", "zero4", id="StrEnum"),
    pytest.param("checkpoint.keep", 1000, 1001, id="whole number with bounds"),
    pytest.param("checkpoint.keep", 1, 1.5, id="whole number, not a fraction"),
    pytest.param("training.warmup", 0.25, -0.25, id="number with bounds"),
    pytest.param("training.warmup", 3, "3", id="number without a point"),
    pytest.param("suspend", True, "true", id="boolean"),
    pytest.param("training.microBatchSize", "auto", "autos", id="number or word: the word"),
    pytest.param("training.microBatchSize", 2, 0, id="number or word: the number"),
    pytest.param("checkpoint.everySteps", None, False, id="optional is absent when null"),
    pytest.param("checkpoint.keep", None, [], id="null takes the default"),
    pytest.param("method.lora", {"r": 4}, {"rank": 4}, id="model in a model"),
    pytest.param("method.lora.targetModules", ["a"], ["a"] * 65, id="list with a longest length"),
    pytest.param("method.lora.targetModules", ["a"], [""], id="list of bounded text"),
    pytest.param("restartPolicy.rules", [{"onClass": "a", "action": "Fail"}],
                 [{"onClass": "a"}], id="list of models"),
    pytest.param("restartPolicy.rules", [{"onExitCodes": [1], "action": "Fail"}],
                 [{"onExitCodes": [0], "action": "Fail"}], id="optional list in a list"),
    pytest.param("podTemplate.metadata.labels", {"a": "b"}, {"a": "b" * 64}, id="map of text"),
    pytest.param("podTemplate.metadata.labels", {"a": None}, {"a": 1}, id="null in a map"),
    pytest.param("podTemplate.spec", {"nodeSelector": {"a": "b"}}, [1], id="fields of a pod"),
    pytest.param("model.source", "pvc://a/b", "/a/b", id="rule on a field"),
    pytest.param("topology", {"nodes": 2, "minNodes": None}, {"maxNodes": 0}, id="rule on a model"),
    pytest.param("training.epochs", None, 1, id="rule over two fields"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "good", "bad"), CONSTRUCTS)
def test_a_construct_of_the_models_behaves_alike(
    server: ApiServer, field: str, good: Any, bad: Any
) -> None:
    for value, fits in ((good, True), (bad, False)):
        made = manifest()
        _put(made["spec"], field.split("."), value)
        answer = server.create(json.dumps(made), JSON, **DRY)
        assert answer.is_accepted is fits, answer.message
        assert (check_object(defaulted(made)) == []) is fits
        if fits:
            assert answer.body["spec"] == defaulted(made)["spec"]


def _put(target: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        target = target.setdefault(part, {})
    target[path[-1]] = value


def _owner(**fields: Any) -> dict[str, Any]:
    given = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", **fields}
    return {"ownerReferences": [{k: v for k, v in given.items() if v is not None}]}


_PREFIX = ".".join(["x" * 63] * 3 + ["x" * 61])  # 253 characters, the most of a DNS name
_OWNERS = [_owner(controller=True, uid=uid)["ownerReferences"][0] for uid in ("u", "v")]

# Metadata that an object may have, and metadata that it may not.
GOOD_METADATA: list[dict[str, Any]] = [
    {"annotations": {"A.com/B": "any text\n\0", "a": None, "x" * 63: "", f"{_PREFIX}/b": "x"}},
    {"annotations": {"a": "x" * (256 * 1024 - 1)}},
    {"annotations": {"a": "é" * (128 * 1024 - 1)}},
    {"labels": {"A": "", "a.b/C_d": "x" * 63, "a": None}},
    {"labels": None, "annotations": None, "finalizers": None, "ownerReferences": None},
    {"generateName": "a-"},
    {"finalizers": ["x", "a.b/c", "a.b/c"]},
    _owner(), _owner(apiVersion="/v1"), _owner(kind="Event", apiVersion="events.k8s.io/v1"),
    {"creationTimestamp": "2020-01-01T00:00:00.5+02:00"},
    {"managedFields": [{"manager": "m", "operation": "X"}], "generation": -1, "uid": ""},
]  # fmt: skip
BAD_METADATA: list[dict[str, Any]] = [
    *({"annotations": {key: "x"}} for key in ("A B", "a/b/c", "", "/b", "a/", "a_b/c", "é", "-a")),
    *({"annotations": {key: "x"}} for key in ("x" * 64, f"x{_PREFIX}/b", "a\n")),
    {"annotations": {"a": "x" * 256 * 1024}}, {"annotations": {"a": "é" * 128 * 1024}},
    {"annotations": {"a": 1}}, {"annotations": []},
    *({"labels": {key: "x"}} for key in ("a/b/c", "A B", "A.com/b", "a\n", "x" * 64, "")),
    *({"labels": {"a": value}} for value in ("x y", "-x", "x\n", "x" * 64, "é", True)),
    *({"name": name} for name in ("a..b", "A", "", "a_b", "a/b", "1", 1, None)),
    *({"generateName": start} for start in ("A B", "a.", "-", "a_", "x" * 254)),
    {"namespace": "A B"},
    *({"finalizers": [name]} for name in ("A B", "a/b/c", "", "A.com/b", "x" * 64, 1, None)),
    {"finalizers": ["orphan", "foregroundDeletion"]}, {"finalizers": {}},
    *(_owner(apiVersion=version) for version in (None, "", "a/b/c", "a/")),
    _owner(kind=None), _owner(name=""), _owner(uid=None), _owner(kind="Event"), _owner(nix=1),
    _owner(controller="yes"), {"ownerReferences": [None]}, {"ownerReferences": _OWNERS},
    *({"creationTimestamp": time} for time in ("", "x", "2020-01-01", 1)),
    {"deletionTimestamp": "x"}, {"generation": 2**63}, {"generation": 1.5},
    {"deletionGracePeriodSeconds": 10**40}, {"managedFields": [{"nix": 1}]}, {"nix": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "fits"), [(GOOD_METADATA, True), (BAD_METADATA, False)], ids=["good", "bad"]
)
def test_metadata_has_the_same_verdict_offline(
    server: ApiServer, table: list[dict[str, Any]], fits: bool
) -> None:
    for metadata in table:
        made = manifest()
        made["metadata"] |= metadata
        answer = server.create(json.dumps(made), JSON, **DRY)
        assert answer.is_accepted is fits, (metadata, answer.message[:500])
        assert (check_object(defaulted(made)) == []) is fits, metadata


def test_a_new_job_shows_a_first_status_nobody_wrote(server: ApiServer, stored: str) -> None:
    job = server.send("GET", f"{JOBS}/{stored}").body
    assert job["status"] == defaulted(manifest())["status"]
    assert {one["type"]: one["status"] for one in job["status"]["conditions"]} == {
        "Ready": "Unknown",
        "Reconciling": "True",
    }


def test_scale_changes_the_nodes_and_the_columns_show_the_job(
    server: ApiServer, stored: str
) -> None:
    scale = server.send("GET", f"{JOBS}/{stored}/scale").body
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (1, 0)
    patch = json.dumps({"spec": {"replicas": 2}})
    kind = "application/merge-patch+json"
    assert server.send("PATCH", f"{JOBS}/{stored}/scale", patch, kind).is_accepted
    assert server.send("GET", f"{JOBS}/{stored}").body["spec"]["topology"]["nodes"] == 2
    refused = server.send("PATCH", f"{JOBS}/{stored}/scale", '{"spec": {"replicas": 3}}', kind)
    assert "must be a multiple of nodes" in refused.message


def test_status_is_written_apart_from_the_spec(server: ApiServer, stored: str) -> None:
    patch = json.dumps({"status": {"phase": "Running"}, "spec": {"suspend": True}})
    kind = "application/merge-patch+json"
    assert server.send("PATCH", f"{JOBS}/{stored}/status", patch, kind).is_accepted
    job = server.send("GET", f"{JOBS}/{stored}").body
    assert (job["status"]["phase"], job["spec"]["suspend"]) == ("Running", False)
    wrong = server.send("PATCH", f"{JOBS}/{stored}/status", '{"status": {"phase": "Nix"}}', kind)
    assert wrong.status == 422


UPDATES: list[dict[str, Any]] = [
    {"suspend": True, "deadlines.activeSeconds": 5, "observability.metricsPort": 9999},
    {"topology.nodes": 2, "restartPolicy.maxRestarts": 0, "ttlSecondsAfterFinished": 1},
    {"training.seed": 1},
    {"queue.name": "team"},
    {"podTemplate.spec": {"nodeSelector": {"a": "b"}}},
    {"backend.local": {"threadsPerProcess": 1}},
    {"backend.type": "other"},
    {"managedBy": "other"},
    {"topology.gpusPerNode": 1},
    {"restartPolicy.backoff.maxSeconds": 5},
]


@pytest.mark.parametrize("overrides", UPDATES, ids=lambda one: " ".join(one))
@pytest.mark.parametrize("is_suspended", [False, True])
def test_an_update_has_the_same_verdict_offline(
    server: ApiServer, stored: str, overrides: dict[str, Any], is_suspended: bool
) -> None:
    before = manifest(name=stored, suspend=is_suspended)
    assert server.update(stored, before).is_accepted
    after = manifest(name=stored, **{"suspend": is_suspended} | overrides)
    answer = server.update(stored, after, **DRY)
    findings = check_object(defaulted(after), defaulted(before))
    assert answer.is_accepted is (findings == []), (answer.message, findings)
    for finding in findings:
        assert show_path(finding.path) in answer.message
        assert finding.message.removeprefix('"other" ') in answer.message


def test_both_names_of_a_backend_are_one(server: ApiServer) -> None:
    def on_hub(backend: dict[str, Any] | None) -> dict[str, Any]:
        hub = {"model.source": "hf://a/b", "dataset.source": "hf://a/c"}
        made = manifest(name="renamed", backend=None, **hub)
        return {**made, "spec": made["spec"] | ({} if backend is None else {"backend": backend})}

    for old, new, field in backend_names.CHANGES:
        created = server.create(json.dumps(on_hub(old)), JSON)
        assert created.is_accepted, created.message
        answer = server.update("renamed", on_hub(new))
        assert answer.is_accepted is not bool(field), (old, new, answer.message)
        assert field in answer.message
        server.send("DELETE", f"{JOBS}/renamed")


def test_a_status_sent_along_makes_no_way_for_a_change_of_the_spec(
    server: ApiServer, stored: str
) -> None:
    after = manifest(name=stored, training__seed=1) | {"status": {"phase": "Running"}}
    query = {"fieldManager": "tests", "force": "true"}
    kind = "application/apply-patch+yaml"
    updated = server.update(stored, after)
    applied = server.send("PATCH", f"{JOBS}/{stored}", json.dumps(after), kind, **query)
    for refused in (updated, applied):
        assert refused.status == 422
        assert "cannot change while the job is not suspended: spec.training" in refused.message
    merge = "application/merge-patch+json"
    patch = json.dumps({"spec": after["spec"], "status": after["status"]})
    assert server.send("PATCH", f"{JOBS}/{stored}/status", patch, merge).is_accepted
    assert server.send("GET", f"{JOBS}/{stored}").body["spec"]["training"]["seed"] == 42


def test_a_status_sent_along_hides_no_broken_rule_of_the_spec(
    server: ApiServer, stored: str
) -> None:
    after = manifest(name=stored, training__liger=True) | {"status": {"phase": "Running"}}
    refused = server.update(stored, after)
    assert refused.status == 422
    assert "training.liger requires GPUs, but topology.gpusPerNode is 0" in refused.message


def _leaves(schema: Schema, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Schema]]:
    for key, inner in schema.get("properties", {}).items():
        yield (*path, key), inner
        yield from _leaves(inner, (*path, key))


LEAVES = list(_leaves(job_schema()["properties"]["spec"], ("spec",)))
WORDS = [
    "",
    "a",
    "auto",
    "none",
    "hf://a/b",
    "file://./x",
    "local",
    "kubernetes",
    "train",
    "A b\n",
    "é",
]


def _values(schema: Schema) -> st.SearchStrategy[Any]:
    """Values at and around every bound of a leaf, and a few of other types."""
    near: list[Any] = [None, True, "x", 0, 1, 1.5, [], {}, *schema.get("enum", [])]
    for key in ("minimum", "maximum"):
        if key in schema:
            near += [schema[key] - 1, schema[key], schema[key] + 1]
    if schema.get("type") == "string":
        near += WORDS
        near += ["x" * (schema["maxLength"] + extra) for extra in (0, 1) if "maxLength" in schema]
    if "default" in schema:
        near.append(schema["default"])
    return st.sampled_from(near)


CHANGES = st.lists(
    st.sampled_from(LEAVES).flatmap(lambda leaf: st.tuples(st.just(leaf[0]), _values(leaf[1]))),
    min_size=1,
    max_size=3,
)


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=CHANGES)
def test_verdict_and_defaults_are_the_same_for_any_manifest(
    cluster: RunningCluster, server: ApiServer, changes: list[tuple[FieldPath, Any]]
) -> None:
    if cluster.faults is not None:
        pytest.skip("the embedded API server decides by the very code it would be compared with")
    made = manifest()
    for path, value in changes:
        target: Any = made
        for part in path[:-1]:
            if not isinstance(target.get(part), dict):
                target[part] = {}
            target = target[part]
        target[path[-1]] = value
    answer = server.create(json.dumps(made), JSON, **DRY)
    findings: list[Finding] = check_object(defaulted(made))
    assert answer.is_accepted is (findings == []), (answer.message, findings)
    if answer.is_accepted:
        assert answer.body["spec"] == defaulted(made)["spec"]
        assert answer.body["status"] == defaulted(made)["status"]


def test_ftctl_crd_is_what_kubectl_applies(server: ApiServer) -> None:
    command = [sys.executable, "-m", "finetune_operator", "crd"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    query = {"fieldManager": "tests", "force": "true", "fieldValidation": "Strict", "dryRun": "All"}
    kind = "application/apply-patch+yaml"
    for crd in yaml.safe_load_all(text):
        name = crd["metadata"]["name"]
        answer = server.send("PATCH", f"{CRDS}/{name}", yaml.safe_dump(crd), kind, **query)
        assert answer.is_accepted, answer.message

"""What clients rely on in an API server: the embedded one does and says what the real one does."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from finetune_operator.kube.api_errors import ApiError, ConflictError, ForbiddenError, InvalidError
from finetune_operator.kube.resources import (
    CONFIG_MAPS,
    CRDS,
    EVENTS,
    FINE_TUNE_JOBS,
    NAMESPACES,
    PODS,
    Object,
    Resource,
)
from support.api.builders import manifest
from support.cluster.operators import Api, wait_until

JSON = "application/json"
MERGE = "application/merge-patch+json"


@dataclass(frozen=True)
class Said:
    status: int
    body: Object
    warning: str | None


@dataclass(frozen=True)
class Server:
    """An API server with a namespace for the tests of one file."""

    api: Api
    namespace: str

    def create(self, resource: Resource, made: Object) -> Object:
        return self.api.run(self.api.client.create(resource, made, self.namespace))

    def config_map(self, name: str, **metadata: Any) -> Object:
        return self.create(CONFIG_MAPS, {"metadata": {"name": name, **metadata}})

    def names(self, resource: Resource = CONFIG_MAPS, **query: str) -> list[str]:
        answer = self.send("GET", resource, **query)
        assert answer.status == 200, answer
        found = [one["metadata"]["name"] for one in answer.body["items"]]
        return [one for one in found if one != "kube-root-ca.crt"]  # a controller's, in every one

    def send(
        self,
        method: str,
        resource: Resource,
        *parts: str,
        body: object = None,
        kind: str = JSON,
        **query: str,
    ) -> Said:
        """Send one request as it stands, and return the answer whatever it is."""
        return self.api.run(
            self._send(method, resource.path(self.namespace, *parts), body, kind, query)
        )

    async def _send(
        self, method: str, path: str, body: object, kind: str, query: dict[str, str]
    ) -> Said:
        access = self.api.client.access
        headers = {**await access.headers(), "Content-Type": kind}
        data = None if body is None else json.dumps(body)
        connector = aiohttp.TCPConnector(ssl=access.ssl_context())
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers) as session,
            session.request(method, access.host + path, params=query, data=data) as answer,
        ):
            text = await answer.text()
            if "watch" in query and answer.status == 200:
                return Said(200, {"events": list(map(json.loads, text.splitlines()))}, None)
            made = json.loads(text) if answer.content_type == JSON else {"message": text}
            return Said(answer.status, made, answer.headers.get("Warning"))


@pytest.fixture(scope="module")
def server(api: Api) -> Iterator[Server]:
    with api.namespace("server") as namespace:
        yield Server(api, namespace)


def test_a_generated_name_is_new_each_time(server: Server) -> None:
    made = [server.create(CONFIG_MAPS, {"metadata": {"generateName": "a-"}}) for _ in range(3)]
    names = {one["metadata"]["name"] for one in made}
    assert len(names) == 3
    assert all(name.startswith("a-") and len(name) == 7 for name in names)


REFUSALS = [
    pytest.param("GET", CONFIG_MAPS, ("none",), None, 404, 'configmaps "none" not found',
                 id="no such object"),
    pytest.param("GET", FINE_TUNE_JOBS, ("none",), None, 404,
                 'finetunejobs.finetune.dev "none" not found', id="no such custom object"),
    pytest.param("POST", CRDS, (), {"metadata": {"name": "a.b.c"}, "spec": {"group": "b.c"}}, 422,
                 None, id="an incomplete definition"),
    pytest.param("GET", Resource("finetune.dev", "v1alpha1", "nothings", "Nothing"), (), None, 404,
                 "404 page not found\n", id="no such kind"),
    pytest.param("POST", CONFIG_MAPS, (), {"metadata": {}}, 422,
                 'ConfigMap "" is invalid: metadata.name: Required value: name or generateName is '
                 "required", id="no name"),
    pytest.param("POST", CONFIG_MAPS, (), {"metadata": {"name": "x"}, "y": 1}, 400,
                 'ConfigMap in version "v1" cannot be handled as a ConfigMap: strict decoding '
                 'error: unknown field "y"', id="unknown field"),
    pytest.param("POST", CONFIG_MAPS, (), {"metadata": {"name": "x", "namespace": "y"}}, 400,
                 "the namespace of the provided object does not match the namespace sent on the "
                 "request", id="another namespace"),
    pytest.param("PUT", CONFIG_MAPS, ("there",), {"metadata": {"name": "other"}}, 400,
                 "the name of the object (other) does not match the name on the URL (there)",
                 id="another name"),
    pytest.param("PUT", CONFIG_MAPS, ("there",),
                 {"metadata": {"name": "there", "resourceVersion": "1"}}, 409,
                 'Operation cannot be fulfilled on configmaps "there": the object has been '
                 "modified; please apply your changes to the latest version and try again",
                 id="stale"),
    pytest.param("PATCH", CONFIG_MAPS, ("there",), {}, 415, None, id="not a patch"),
    pytest.param("GET", FINE_TUNE_JOBS, ("there", "log"), None, 404, None,
                 id="no such subresource"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "resource", "parts", "body", "status", "message"), REFUSALS)
def test_a_refusal_has_the_words_of_the_real_server(
    server: Server,
    method: str,
    resource: Resource,
    parts: tuple[str, ...],
    body: Object | None,
    status: int,
    message: str | None,
) -> None:
    if server.api.get(CONFIG_MAPS, server.namespace, "there") is None:
        server.config_map("there")
    said = server.send(method, resource, *parts, body=body, fieldValidation="Strict")
    assert said.status == status, said
    assert message in (None, said.body["message"])


JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"
NONSENSE = [
    ("POST", (), [], JSON),
    ("POST", (), {"metadata": [1]}, JSON),
    ("PUT", ("there",), None, JSON),
    ("PUT", ("there",), {"metadata": {"name": "there", "finalizers": 5}}, JSON),
    ("PATCH", ("there",), "x", JSON_PATCH),
    ("PATCH", ("there",), [{"op": "add"}], JSON_PATCH),
    ("PATCH", ("there",), [{"op": "replace", "path": "/metadata", "value": 1}], JSON_PATCH),
    ("PATCH", ("there",), 5, MERGE),
    ("PATCH", ("there",), {"metadata": 1.5}, APPLY),
    ("DELETE", ("there",), {"preconditions": ["x"]}, JSON),
]


def test_nonsense_is_answered_by_a_refusal_that_clients_can_read(server: Server) -> None:
    if server.api.get(CONFIG_MAPS, server.namespace, "there") is None:
        server.config_map("there")
    for method, parts, body, kind in NONSENSE:
        said = server.send(method, CONFIG_MAPS, *parts, body=body, kind=kind)
        assert (said.body.get("kind"), said.status < 400) == ("Status", False), (body, said)
    for query in ({"continue": "x"}, {"labelSelector": "a b"}, {"fieldSelector": "a"}):
        said = server.send("GET", CONFIG_MAPS, **query)
        assert (said.status, said.body["reason"]) == (400, "BadRequest")


SELECTORS = [
    ("tier=a", ["one"]),
    ("tier!=a", ["three", "two"]),
    ("tier in (a, b)", ["one", "two"]),
    ("tier notin (a)", ["three", "two"]),
    ("tier", ["one", "two"]),
    ("!tier", ["three"]),
    ("zone=z,tier=b", ["two"]),
]


@pytest.fixture(scope="module")
def labelled(server: Server) -> Server:
    server.config_map("one", labels={"zone": "z", "tier": "a"})
    server.config_map("two", labels={"zone": "z", "tier": "b"})
    server.config_map("three", labels={"zone": "z"})
    return server


@pytest.mark.parametrize(("selector", "names"), SELECTORS)
def test_a_label_selector_chooses(labelled: Server, selector: str, names: list[str]) -> None:
    assert labelled.names(labelSelector=f"zone=z,{selector}") == names


def test_a_field_selector_chooses_by_name_and_events_by_their_object(labelled: Server) -> None:
    assert labelled.names(fieldSelector="metadata.name=two") == ["two"]
    about = {"kind": "ConfigMap", "name": "two", "namespace": labelled.namespace}
    labelled.create(EVENTS, {"metadata": {"name": "e"}, "involvedObject": about, "reason": "R"})
    assert labelled.names(EVENTS, fieldSelector="involvedObject.name=two") == ["e"]
    assert labelled.names(EVENTS, fieldSelector="involvedObject.name=one") == []
    said = labelled.send("GET", FINE_TUNE_JOBS, fieldSelector="spec.suspend=true")
    assert (said.status, said.body["message"]) == (400, "field label not supported: spec.suspend")


def test_pages_go_on_where_the_last_one_ended(labelled: Server) -> None:
    first = labelled.send("GET", CONFIG_MAPS, labelSelector="zone=z", limit="2").body
    token = first["metadata"]["continue"]
    rest = labelled.names(labelSelector="zone=z", limit="2", **{"continue": token})
    assert [one["metadata"]["name"] for one in first["items"]] + rest == ["one", "three", "two"]


def test_a_watch_shows_what_enters_and_leaves_its_selection(server: Server) -> None:
    client, namespace = server.api.client, server.namespace

    async def work() -> list[tuple[str, str]]:
        at = (await client.list(CONFIG_MAPS, namespace)).resource_version
        await client.create(CONFIG_MAPS, {"metadata": {"name": "w"}}, namespace)
        for labels in ({"shown": "1"}, {"shown": "2"}, {"shown": None}, {"shown": "3"}):
            await client.patch(CONFIG_MAPS, "w", namespace, {"metadata": {"labels": labels}})
        await client.delete(CONFIG_MAPS, "w", namespace)
        events = client.watch(
            CONFIG_MAPS, namespace, resource_version=at, label_selector="shown", timeout_seconds=3
        )
        return [
            (one.type, one.object["metadata"]["name"])
            async for one in events
            if one.type != "BOOKMARK"
        ]

    kinds = ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    assert server.api.run(work()) == [(kind, "w") for kind in kinds]


def test_a_watch_without_a_version_begins_with_what_is_there(labelled: Server) -> None:
    async def work() -> list[str]:
        client, namespace = labelled.api.client, labelled.namespace
        events = client.watch(
            CONFIG_MAPS, namespace, resource_version="0", label_selector="tier", timeout_seconds=1
        )
        return [one.object["metadata"]["name"] async for one in events if one.type == "ADDED"]

    assert sorted(labelled.api.run(work())) == ["one", "two"]


def test_a_watch_that_asks_for_it_says_where_the_first_objects_end(labelled: Server) -> None:
    asked = {"watch": "1", "sendInitialEvents": "true", "allowWatchBookmarks": "true"}
    asked |= {"resourceVersionMatch": "NotOlderThan", "timeoutSeconds": "3"}
    events = labelled.send("GET", CONFIG_MAPS, labelSelector="tier", **asked).body["events"]
    kinds = [one["type"] for one in events]
    assert kinds[:3] == ["ADDED", "ADDED", "BOOKMARK"]
    annotations = events[2]["object"]["metadata"]["annotations"]
    assert annotations == {"k8s.io/initial-events-end": "true"}


def test_a_change_that_changes_nothing_makes_no_version(server: Server) -> None:
    before = server.config_map("same", labels={"a": "b"})
    again = server.send("PUT", CONFIG_MAPS, "same", body=before).body
    patch = {"metadata": {"labels": {"a": "b"}}}
    patched = server.send("PATCH", CONFIG_MAPS, "same", body=patch, kind=MERGE).body
    versions = {one["metadata"]["resourceVersion"] for one in (before, again, patched)}
    assert len(versions) == 1


def test_spec_status_and_metadata_are_written_apart(server: Server) -> None:
    job = manifest(name="parts")
    job["metadata"].pop("namespace")
    made = server.create(FINE_TUNE_JOBS, {**job, "status": {"phase": "Running"}})
    assert (made["status"]["phase"], made["metadata"]["generation"]) == ("Pending", 1)
    patch = {"metadata": {"labels": {"a": "b"}}, "status": {"phase": "Failed"}, "spec": {}}
    changed = server.send("PATCH", FINE_TUNE_JOBS, "parts", body=patch, kind=MERGE).body
    assert (changed["status"]["phase"], changed["metadata"]["generation"]) == ("Pending", 1)
    patch = {"metadata": {"labels": {"c": "d"}}, "status": {"phase": "Running"}}
    said = server.send("PATCH", FINE_TUNE_JOBS, "parts", "status", body=patch, kind=MERGE).body
    assert (said["status"]["phase"], said["metadata"]["labels"]) == ("Running", {"a": "b"})
    patch = {"spec": {"suspend": True}}
    after = server.send("PATCH", FINE_TUNE_JOBS, "parts", body=patch, kind=MERGE).body
    assert (after["metadata"]["generation"], after["status"]["phase"]) == (2, "Running")
    body = {**after, "metadata": {"name": "parts"}}
    unversioned = server.send("PUT", FINE_TUNE_JOBS, "parts", body=body)
    assert unversioned.status == 422
    assert "metadata.resourceVersion: Invalid value: " in unversioned.body["message"]
    assert "must be specified for an update" in unversioned.body["message"]


def test_an_unknown_field_is_dropped_with_a_warning(server: Server) -> None:
    job = manifest(name="warned")
    job["metadata"].pop("namespace")
    job["spec"]["trainng"] = 1
    said = server.send("POST", FINE_TUNE_JOBS, body=job)
    assert (said.status, said.warning) == (201, '299 - "unknown field \\"spec.trainng\\""')
    assert "trainng" not in said.body["spec"]
    silent = server.send("POST", FINE_TUNE_JOBS, body=job, fieldValidation="Ignore", dryRun="All")
    assert silent.warning is None


def test_a_dry_run_answers_and_stores_nothing(server: Server) -> None:
    made = {"metadata": {"name": "dry"}}
    assert server.send("POST", CONFIG_MAPS, body=made, dryRun="All").status == 201
    assert server.send("DELETE", CONFIG_MAPS, "dry", dryRun="All").status == 404
    server.config_map("dry")
    patch = {"data": {"a": "1"}}
    said = server.send("PATCH", CONFIG_MAPS, "dry", body=patch, kind=MERGE, dryRun="All")
    assert said.body["data"] == {"a": "1"}
    assert server.send("DELETE", CONFIG_MAPS, "dry", dryRun="All").status == 200
    there = server.api.get(CONFIG_MAPS, server.namespace, "dry")
    assert there is not None
    assert "data" not in there


def test_a_deletion_is_refused_whose_preconditions_do_not_hold(server: Server) -> None:
    made = server.config_map("kept")
    uid, version = made["metadata"]["uid"], made["metadata"]["resourceVersion"]
    body = {"preconditions": {"uid": "other"}}
    said = server.send("DELETE", CONFIG_MAPS, "kept", body=body)
    assert (said.status, said.body["reason"]) == (409, "Conflict")
    assert (
        f"the UID in the precondition (other) does not match the UID in record ({uid})"
        in (said.body["message"])
    )
    body = {"preconditions": {"resourceVersion": "1"}}
    assert server.send("DELETE", CONFIG_MAPS, "kept", body=body).status == 409
    body = {"preconditions": {"uid": uid, "resourceVersion": version}}
    assert server.send("DELETE", CONFIG_MAPS, "kept", body=body).status == 200


def test_a_collection_is_deleted_by_its_labels(server: Server) -> None:
    for number in range(3):
        server.config_map(f"many-{number}", labels={"many": str(number)})
    assert server.send("DELETE", CONFIG_MAPS, labelSelector="many in (0,1)").status == 200
    assert server.names(labelSelector="many") == ["many-2"]


def test_a_finalizer_holds_an_object_and_none_is_added_meanwhile(server: Server) -> None:
    server.config_map("held", finalizers=["a.b/c"])
    said = server.send("DELETE", CONFIG_MAPS, "held")
    assert "deletionTimestamp" in said.body["metadata"]
    patch = {"metadata": {"finalizers": ["a.b/c", "a.b/d"]}}
    added = server.send("PATCH", CONFIG_MAPS, "held", body=patch, kind=MERGE)
    assert added.status == 422
    assert "no new finalizers can be added if the object is being deleted" in added.body["message"]
    released = {"metadata": {"finalizers": None}}
    assert server.send("PATCH", CONFIG_MAPS, "held", body=released, kind=MERGE).status == 200
    assert server.api.get(CONFIG_MAPS, server.namespace, "held") is None


def owner_of(made: Object, uid: str | None = None) -> Object:
    metadata = made["metadata"]
    kind = {"apiVersion": "v1", "kind": "ConfigMap", "name": metadata["name"]}
    return {**kind, "uid": uid or metadata["uid"]}


def test_what_nobody_owns_any_more_is_collected_and_an_orphan_is_not(server: Server) -> None:
    owner = server.config_map("owner")
    orphaned = server.config_map("orphaned")
    server.config_map("child", ownerReferences=[owner_of(owner)])
    server.config_map("shared", ownerReferences=[owner_of(owner), owner_of(orphaned)])
    server.config_map("left", ownerReferences=[owner_of(orphaned)])
    server.config_map("lost", ownerReferences=[owner_of(owner, "no-such-uid")])
    server.api.run(server.api.client.delete(CONFIG_MAPS, "owner", server.namespace))
    wait_until(lambda: server.api.get(CONFIG_MAPS, server.namespace, "child") is None, 30)
    wait_until(lambda: server.api.get(CONFIG_MAPS, server.namespace, "lost") is None, 30)
    assert server.api.get(CONFIG_MAPS, server.namespace, "shared") is not None
    client = server.api.client
    server.api.run(client.delete(CONFIG_MAPS, "orphaned", server.namespace, propagation="Orphan"))
    wait_until(lambda: server.api.get(CONFIG_MAPS, server.namespace, "orphaned") is None, 30)
    left = server.api.get(CONFIG_MAPS, server.namespace, "left")
    assert left is not None
    assert "ownerReferences" not in left["metadata"]


def test_a_namespace_takes_everything_in_it_and_takes_in_nothing_more(api: Api) -> None:
    client = api.client
    with api.namespace("ends") as namespace:
        held = {"metadata": {"name": "held", "finalizers": ["a.b/c"]}}
        api.run(client.create(CONFIG_MAPS, held, namespace))
        api.run(client.create(CONFIG_MAPS, {"metadata": {"name": "free"}}, namespace))
        api.run(client.delete(NAMESPACES, namespace))
        wait_until(lambda: api.get(CONFIG_MAPS, namespace, "free") is None, 30)
        with pytest.raises(ForbiddenError, match="because it is being terminated"):
            api.run(client.create(CONFIG_MAPS, {"metadata": {"name": "late"}}, namespace))
        free = {"metadata": {"finalizers": None}}
        api.run(client.patch(CONFIG_MAPS, "held", namespace, free))
        wait_until(lambda: api.get(NAMESPACES, "", namespace) is None, 30)
        api.run(client.create(NAMESPACES, {"metadata": {"name": namespace}}))


THING = Resource("tests.finetune.dev", "v1", "things", "Thing")


def test_a_kind_comes_and_goes_with_its_crd(server: Server) -> None:
    spec = {
        "type": "object",
        "properties": {
            "size": {"type": "integer", "default": 3},
            "most": {"type": "integer", "default": 5},
        },
        "x-kubernetes-validations": [
            {"rule": "self.size <= self.most", "message": "size is above most"}
        ],
    }
    schema = {"type": "object", "properties": {"spec": {**spec, "default": {"size": 3, "most": 5}}}}
    definition = {
        "metadata": {"name": "things.tests.finetune.dev"},
        "spec": {
            "group": THING.group,
            "scope": "Namespaced",
            "names": {"plural": THING.plural, "kind": THING.kind},
            "versions": [
                {
                    "name": "v1", "served": True, "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }  # fmt: skip
    client = server.api.client
    made = server.api.run(client.create(CRDS, definition))
    assert made["spec"]["names"]["listKind"] == "ThingList"
    wait_until(lambda: server.send("GET", THING).status == 200, 20)
    kind = {"apiVersion": "tests.finetune.dev/v1", "kind": "Thing"}
    thing = server.create(THING, {**kind, "metadata": {"name": "a"}})
    assert thing["spec"] == {"size": 3, "most": 5}
    with pytest.raises(InvalidError, match="size is above most"):
        server.create(THING, {**kind, "metadata": {"name": "b"}, "spec": {"size": 9}})
    server.api.run(client.delete(CRDS, "things.tests.finetune.dev"))
    wait_until(lambda: server.send("GET", THING).status == 404, 30)


def test_a_strategic_merge_finds_containers_by_their_name(server: Server) -> None:
    containers = [{"name": name, "image": f"localhost/{name}:1"} for name in ("a", "b")]
    wait_until(lambda: _created(server, {"containers": containers}), 20)
    patch = {"spec": {"containers": [{"name": "b", "image": "localhost/c:1"}]}}
    kind = "application/strategic-merge-patch+json"
    made = server.send("PATCH", PODS, "pod", body=patch, kind=kind).body
    images = {one["name"]: one["image"] for one in made["spec"]["containers"]}
    assert images == {"a": "localhost/a:1", "b": "localhost/c:1"}
    refused = server.send("PATCH", FINE_TUNE_JOBS, "pod", body=patch, kind=kind)
    assert refused.status in (404, 415)


def _created(server: Server, spec: Object) -> bool:
    """A pod needs the namespace's service account, which a controller makes."""
    try:
        server.create(PODS, {"metadata": {"name": "pod"}, "spec": spec})
    except ForbiddenError:
        return False
    return True


def test_two_writers_of_one_version_make_one_change(server: Server) -> None:
    made = server.config_map("raced")
    client = server.api.client
    first = {**made, "data": {"by": "first"}}
    server.api.run(client.replace(CONFIG_MAPS, first, server.namespace))
    with pytest.raises(ConflictError) as refused:
        server.api.run(client.replace(CONFIG_MAPS, made, server.namespace))
    assert isinstance(refused.value, ApiError)
    assert refused.value.reason == "Conflict"

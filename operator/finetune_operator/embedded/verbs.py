"""Every verb but watch, on the store: what a request asks for, and the object of its answer."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from finetune_operator.api.paths import Finding
from finetune_operator.api.problems import Problem
from finetune_operator.api.yaml_documents import read_yaml
from finetune_operator.embedded import patches
from finetune_operator.embedded.admission import Admitted, admit_change, admit_new, check_delete
from finetune_operator.embedded.kinds import Kind
from finetune_operator.embedded.refusals import (
    RefusalError,
    already_exists,
    bad_request,
    expired,
    invalid,
    not_found,
    terminating,
)
from finetune_operator.embedded.selectors import selects
from finetune_operator.embedded.store import FOREGROUND, Store, timestamp
from finetune_operator.embedded.tables import find
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.resources import NAMESPACES, Object

_YAML = "application/yaml"


@dataclass(frozen=True)
class Asked:
    """One request about objects of one kind.

    Attributes:
        namespace: Empty for all, and for kinds that live in none.
        name: Empty for the collection.
        query: The URL's parameters.
        content_type: Of the body, without parameters.
    """

    kind: Kind
    namespace: str
    name: str
    subresource: str
    query: Mapping[str, str]
    content_type: str = ""
    body: bytes = b""

    @property
    def key(self) -> Key:
        """Key of the object."""
        return Key(self.namespace, self.name)

    @property
    def is_dry(self) -> bool:
        """Whether nothing may be stored."""
        return "dryRun" in self.query

    @property
    def validation(self) -> str:
        """What becomes of unknown fields."""
        return self.query.get("fieldValidation") or "Warn"


@dataclass(frozen=True)
class Answer:
    """What is sent back.

    Attributes:
        warnings: Sentences for the client.
    """

    made: Object
    status: int = 200
    warnings: Sequence[str] = ()


def get(store: Store, asked: Asked) -> Answer:
    """Return one object, or its scale."""
    made = _found(store, asked)
    return Answer(_scale(asked.kind, made) if asked.subresource == "scale" else made)


def list_page(store: Store, asked: Asked) -> tuple[list[Object], Object]:
    """Return the objects of one page, and the metadata of the list.

    A page shows the objects as they are now, but the list keeps the version of its first page, so
    that a watch from there on repeats what came in between and misses nothing.

    Raises:
        RefusalError: a selector is no good, or the page's version is forgotten.
    """
    query = asked.query
    matches = selects(asked.kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
    items = [one for one in store.objects(asked.kind, asked.namespace or None) if matches(one)]
    version = store.version
    if token := query.get("continue"):
        version, *after = _decoded(token)
        if version < store.oldest:
            raise expired(version, store.oldest)
        items = [one for one in items if key_of(one) > Key(*after)]
    metadata: Object = {"resourceVersion": str(version)}
    limit = whole_number(query, "limit")
    if 0 < limit < len(items):
        last = key_of(items[limit - 1])
        metadata["continue"] = base64.urlsafe_b64encode(orjson.dumps([version, *last])).decode()
        metadata["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    return items, metadata


def create(store: Store, asked: Asked) -> Answer:
    """Create an object."""
    return _create(store, asked, _read(asked))


def _create(store: Store, asked: Asked, body: Object) -> Answer:
    kind, resource = asked.kind, asked.kind.resource
    if resource.namespaced:
        home = store.get(store.kinds[str(NAMESPACES)], Key("", asked.namespace))
        if home is None:
            raise not_found(NAMESPACES, asked.namespace)
        if "deletionTimestamp" in home["metadata"]:
            name = str(body["metadata"].get("name", ""))
            raise terminating(resource, name, asked.namespace)
    admitted = admit_new(kind, body, asked.namespace, asked.validation, asked.name or None)
    made = admitted.made
    if store.get(kind, key_of(made)) is not None:
        raise already_exists(resource, made["metadata"]["name"])
    return _stored(store, asked, admitted, 201)


def update(store: Store, asked: Asked) -> Answer:
    """Replace an object, its status or its scale."""
    before, body = _found(store, asked), _read(asked)
    if asked.kind.is_custom and not body["metadata"].get("resourceVersion"):
        must = Finding(("metadata", "resourceVersion"), "must be specified for an update")
        raise invalid(asked.kind.resource, before, [must])
    return _change(store, asked, before, body)


def patch(store: Store, asked: Asked) -> Answer:
    """Patch an object, its status or its scale; an apply may create it."""
    body = _read(asked)
    if asked.content_type == patches.APPLY and not asked.subresource:
        live = store.get(asked.kind, asked.key)
        made = _applied(asked, live or {}, body)
        if live is None:
            return _create(store, asked, made)
        return _change(store, asked, live, made)
    before = _found(store, asked)
    target = _scale(asked.kind, before) if asked.subresource == "scale" else before
    match asked.content_type:
        case patches.MERGE:
            made = patches.merge(target, body)
        case patches.JSON_PATCH:
            made = patches.json_patch(target, body)
        case patches.STRATEGIC if not asked.kind.is_custom:
            made = patches.strategic(target, body)
        case patches.APPLY:
            made = _applied(asked, target, body)
        case _:
            raise _unsupported(asked)
    return _change(store, asked, before, _object(made))


def _applied(asked: Asked, live: Object, body: Object) -> Object:
    query = asked.query
    manager, force = query.get("fieldManager", ""), query.get("force") == "true"
    named = {"name": asked.name, **({"namespace": asked.namespace} if asked.namespace else {})}
    made = patches.apply(live, body, manager, force=force, time=timestamp())
    made["metadata"] = {**named, **made["metadata"]}
    return {"apiVersion": body.get("apiVersion"), "kind": body.get("kind"), **made}


def _change(store: Store, asked: Asked, before: Object, body: Object) -> Answer:
    if asked.subresource == "scale":
        body = _rescaled(asked.kind, before, body)
        asked = replace(asked, subresource="")
        answer = _change(store, asked, before, body)
        return Answer(_scale(asked.kind, answer.made))
    admitted = admit_change(asked.kind, body, before, asked.validation, asked.subresource or None)
    if admitted.made is before:
        return Answer(before, warnings=admitted.warnings)
    return _stored(store, asked, admitted, 200)


def _stored(store: Store, asked: Asked, admitted: Admitted, status: int) -> Answer:
    made = admitted.made if asked.is_dry else store.put(asked.kind, admitted.made)
    return Answer(made, status, admitted.warnings)


def delete(store: Store, asked: Asked) -> Answer:
    """Delete one object, or all that the selectors choose."""
    options = _read(asked) if asked.body else {}
    policy = options.get("propagationPolicy") or asked.query.get("propagationPolicy")
    if asked.name:
        return _delete(store, asked, _found(store, asked), options, policy)
    items, metadata = list_page(store, asked)
    for made in items:
        _delete(store, asked, made, {}, policy)
    resource = asked.kind.resource
    kind = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
    return Answer({**kind, "metadata": metadata, "items": items})


def _delete(
    store: Store, asked: Asked, made: Object, options: Object, policy: str | None
) -> Answer:
    kind, metadata = asked.kind, made["metadata"]
    check_delete(kind.resource, made, _part(options, "preconditions"))
    if not asked.is_dry:
        if policy == "Orphan":
            store.orphan(metadata["uid"])
        if policy == "Foreground" and "deletionTimestamp" not in metadata:
            finalizers = [*metadata.get("finalizers", ()), FOREGROUND]
            made = {**made, "metadata": {**metadata, "finalizers": finalizers}}
        if (left := store.delete(kind, made)) is not None:
            return Answer(left)
    group = {"group": kind.resource.group} if kind.resource.group else {}
    details = {"name": metadata["name"], **group, "kind": kind.resource.plural}
    done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return Answer({**done, "details": {**details, "uid": metadata["uid"]}})


def _found(store: Store, asked: Asked) -> Object:
    made = store.get(asked.kind, asked.key)
    if made is None:
        raise not_found(asked.kind.resource, asked.name)
    return made


def _read(asked: Asked) -> Any:
    """Return the body as JSON.

    Raises:
        RefusalError: it is neither JSON nor YAML, or of a kind that is not taken.
    """
    if asked.content_type in (_YAML, patches.APPLY):
        documents = list(read_yaml(asked.body.decode(errors="replace"), "the request"))
        for one in documents:
            problems = [one] if isinstance(one, Problem) else one.problems
            if problems:
                said = f"{problems[0].path} {problems[0].message}".strip()
                raise bad_request(f"error decoding YAML: {said}")
        values = [one.value for one in documents if not isinstance(one, Problem)]
        return _object(values[0] if len(values) == 1 else values)
    if not asked.content_type.endswith("json"):
        raise _unsupported(asked)
    try:
        value = orjson.loads(asked.body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"error decoding JSON: {error}") from error
    return value if asked.content_type == patches.JSON_PATCH else _object(value)


def _object(value: Any) -> Object:
    """Return what was sent as an object with metadata, be they empty."""
    if not isinstance(value, dict):
        raise bad_request("the body is not one object")
    return {**value, "metadata": _part(value, "metadata")}


def _part(value: Object, key: str) -> Object:
    part = value.get(key) or {}
    if not isinstance(part, dict):
        raise bad_request(f"{key} is not an object")
    return part


def whole_number(query: Mapping[str, str], key: str) -> int:
    """Return a parameter of the URL; 0 where it is absent.

    Raises:
        RefusalError: it is no whole number.
    """
    text = query.get(key) or "0"
    if not text.isdecimal():
        raise bad_request(f"{key}: Invalid value: {text}: must be a whole number")
    return int(text)


def _decoded(token: str) -> list[Any]:
    try:
        version, namespace, name = orjson.loads(base64.urlsafe_b64decode(token))
    except ValueError as error:
        raise bad_request("continue key is not valid") from error
    return [version, namespace, name]


def _unsupported(asked: Asked) -> RefusalError:
    # `kubectl create KIND` and typed Go clients send protobuf.
    message = f"{asked.content_type or 'no content type'} is not read here; send JSON or YAML"
    return RefusalError(415, "UnsupportedMediaType", f"{message}, as kubectl apply does")


def _scale(kind: Kind, made: Object) -> Object:
    assert kind.scale is not None, "a request for a scale is refused where there is none"
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    numbers = {
        part: next(find(made, kind.scale[f"{part}ReplicasPath"]), None) or 0
        for part in ("spec", "status")
    }
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: made["metadata"][key] for key in kept if key in made["metadata"]},
        "spec": {"replicas": numbers["spec"]},
        "status": {"replicas": numbers["status"]},
    }


def _rescaled(kind: Kind, before: Object, scale: Object) -> Object:
    assert kind.scale is not None, "a request for a scale is refused where there is none"
    change: Any = _part(scale, "spec").get("replicas")
    for part in reversed(kind.scale["specReplicasPath"].strip(".").split(".")):
        change = {part: change}
    version = _part(scale, "metadata").get("resourceVersion")
    wanted = {"metadata": {"resourceVersion": version}} if version else {}
    made: Object = patches.merge(before, change | wanted)
    return made

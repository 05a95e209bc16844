"""Every verb but watch: requests are parsed, carried out on the store, and answered."""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from finetune_operator.api.paths import Finding
from finetune_operator.api.problems import Problem
from finetune_operator.api.yaml_documents import read_yaml
from finetune_operator.embedded import patches
from finetune_operator.embedded import status_errors as errors
from finetune_operator.embedded.admission import admit_change, admit_new, check_preconditions
from finetune_operator.embedded.kinds import Kind
from finetune_operator.embedded.selectors import selects
from finetune_operator.embedded.status_errors import StatusError, bad_request
from finetune_operator.embedded.store import Store, timestamp
from finetune_operator.embedded.tables import find
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.resources import NAMESPACES, Object

_PATH = re.compile(
    r"(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[^/]+))?)?"
)
_YAML = "application/yaml"
_MOST_DIGITS = 19  # of a number of 64 bits


@dataclass(frozen=True)
class ApiRequest:
    """One request about objects of one kind.

    Attributes:
        key: Of the object; its namespace is empty for all, its name for the collection.
        subresource: `status`, `scale` or nothing.
        query: The URL's parameters.
        content_type: Of the body, without parameters.
    """

    kind: Kind
    key: Key
    subresource: str
    query: Mapping[str, str]
    content_type: str
    body: bytes

    @property
    def validation(self) -> str:
        """What becomes of unknown fields."""
        return self.query.get("fieldValidation") or "Warn"

    def number(self, parameter: str) -> int:
        """Return a parameter of the URL; 0 where it is absent.

        Raises:
            StatusError: it is no whole number.
        """
        text = self.query.get(parameter) or "0"
        if not text.isdecimal() or len(text) > _MOST_DIGITS:
            raise bad_request(
                f"{parameter}: Invalid value: {text}: must be a whole number of 64 bits"
            )
        return int(text)


def parse_request(
    store: Store, path: str, query: Mapping[str, str], content_type: str, body: bytes
) -> ApiRequest | None:
    """Return the request, or None where nothing is served under the path.

    `path` has no slash at its start, and `content_type` no parameters.
    """
    parts = _PATH.fullmatch(path)
    if parts is None:
        return None
    group, version, namespace, plural, name, subresource = parts.groups("")
    kind = store.kinds.get(f"{plural}.{group}".rstrip("."))
    if (
        kind is None
        or kind.resource.version != version
        or (namespace and not kind.resource.namespaced)
        or (subresource and subresource not in kind.subresources)
    ):
        return None
    return ApiRequest(kind, Key(namespace, name), subresource, query, content_type, body)


@dataclass(frozen=True)
class Answer:
    """An object, an HTTP status, and warnings for the client."""

    made: Object
    status: int = 200
    warnings: Sequence[str] = ()


def _get(store: Store, request: ApiRequest) -> Answer:
    made = _found(store, request)
    return Answer(_scale(request.kind, made) if request.subresource == "scale" else made)


def _list(store: Store, request: ApiRequest) -> Answer:
    """Return the objects of one page.

    A page shows the objects as they are now, but the list keeps the version of its first page, so
    that a watch from there on repeats what came in between and misses nothing.
    """
    matches = selects(request.kind, request.key.namespace, request.query)
    items = [made for made in store.objects(request.kind) if matches(made)]
    version = store.version
    if token := request.query.get("continue"):
        try:
            version, *after = orjson.loads(base64.urlsafe_b64decode(token))
        except ValueError as error:
            raise bad_request("continue key is not valid") from error
        if version < store.oldest:
            raise errors.expired(version, store.oldest)
        items = [one for one in items if key_of(one) > Key(*after)]
    metadata: Object = {"resourceVersion": str(version)}
    limit = request.number("limit")
    if 0 < limit < len(items):
        last = key_of(items[limit - 1])
        metadata["continue"] = base64.urlsafe_b64encode(orjson.dumps([version, *last])).decode()
        metadata["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    resource = request.kind.resource
    kind = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
    return Answer({**kind, "metadata": metadata, "items": items})


def _created(store: Store, request: ApiRequest, body: Object) -> Answer:
    kind, resource, namespace = request.kind, request.kind.resource, request.key.namespace
    if resource.namespaced:
        home = store.get(store.kinds[str(NAMESPACES)], Key("", namespace))
        if home is None:
            raise errors.not_found(NAMESPACES, namespace)
        if "deletionTimestamp" in home["metadata"]:
            name = str(body["metadata"].get("name", ""))
            why = f"unable to create new content in namespace {namespace} because it is being"
            message = f'{resource} "{name}" is forbidden: {why} terminated'
            raise StatusError(403, "Forbidden", message, errors.about(resource, name))
    made, warnings = admit_new(kind, body, namespace, request.key.name, request.validation)
    if store.get(kind, key_of(made)) is not None:
        name = made["metadata"]["name"]
        message = f'{resource} "{name}" already exists'
        raise StatusError(409, "AlreadyExists", message, errors.about(resource, name))
    return Answer(made if "dryRun" in request.query else store.put(kind, made), 201, warnings)


def _update(store: Store, request: ApiRequest) -> Answer:
    before, body = _found(store, request), _read(request)
    if request.kind.is_custom and not body["metadata"].get("resourceVersion"):
        must = Finding(("metadata", "resourceVersion"), "must be specified for an update")
        raise errors.invalid(request.kind.resource, before, [must])
    return _changed(store, request, before, body)


def _patch(store: Store, request: ApiRequest) -> Answer:
    """Patch an object, its status or its scale; an apply may create it."""
    body = _read(request)
    before = store.get(request.kind, request.key)
    if before is None and request.content_type == patches.APPLY and not request.subresource:
        return _created(store, request, _applied(request, {}, body))
    before = _found(store, request)
    target = _scale(request.kind, before) if request.subresource == "scale" else before
    match request.content_type:
        case patches.MERGE:
            made = patches.merge(target, body)
        case patches.JSON_PATCH:
            made = patches.json_patch(target, body)
        case patches.STRATEGIC if not request.kind.is_custom:
            made = patches.merge(target, body, patches.LIST_KEYS)
        case patches.APPLY:
            made = _applied(request, target, body)
        case _:
            raise _unsupported(request)
    return _changed(store, request, before, _object(made))


def _applied(request: ApiRequest, live: Object, body: Object) -> Object:
    manager, force = request.query.get("fieldManager", ""), request.query.get("force") == "true"
    made = patches.apply(live, body, manager, force=force, time=timestamp())
    return {"apiVersion": body.get("apiVersion"), "kind": body.get("kind"), **made}


def _changed(store: Store, request: ApiRequest, before: Object, body: Object) -> Answer:
    kind, is_scale = request.kind, request.subresource == "scale"
    made, warnings = admit_change(
        kind,
        _rescaled(kind, before, body) if is_scale else body,
        before,
        request.validation,
        is_status=request.subresource == "status",
    )
    if made is not before and "dryRun" not in request.query:
        made = store.put(kind, made)
    return Answer(_scale(kind, made) if is_scale else made, 200, warnings)


def _delete(store: Store, request: ApiRequest) -> Answer:
    """Delete one object, or all that the selectors choose."""
    if not request.key.name:
        listed = _list(store, request)
        for made in listed.made["items"]:
            _delete(store, replace(request, key=key_of(made)))
        return listed
    options = _read(request) if request.body else {}
    policy = options.get("propagationPolicy") or request.query.get("propagationPolicy")
    kind, made = request.kind, _found(store, request)
    metadata = made["metadata"]
    check_preconditions(kind.resource, made, _part(options, "preconditions"))
    if "dryRun" not in request.query:
        if policy == "Orphan":
            store.orphan(metadata["uid"])
        left = store.delete(kind, made, is_foreground=policy == "Foreground")
        if left["metadata"]["finalizers"]:
            return Answer(left)
    details = {**errors.about(kind.resource, metadata["name"]), "uid": metadata["uid"]}
    done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return Answer({**done, "details": details})


VERBS: Mapping[str, Callable[[Store, ApiRequest], Answer]] = {
    "get": _get,
    "list": _list,
    "create": lambda store, request: _created(store, request, _read(request)),
    "update": _update,
    "patch": _patch,
    "delete": _delete,
}
"""What a verb does; each raises StatusError."""


def _found(store: Store, request: ApiRequest) -> Object:
    made = store.get(request.kind, request.key)
    if made is None:
        raise errors.not_found(request.kind.resource, request.key.name)
    return made


def _read(request: ApiRequest) -> Any:
    """Return the body as JSON."""
    if request.content_type in (_YAML, patches.APPLY):
        documents = list(read_yaml(request.body.decode(errors="replace"), "the request"))
        for one in documents:
            for problem in [one] if isinstance(one, Problem) else one.problems:
                raise bad_request(f"error decoding YAML: {problem}")
        values = [one.value for one in documents if not isinstance(one, Problem)]
        return _object(values[0] if len(values) == 1 else values)
    if not request.content_type.endswith("json"):
        raise _unsupported(request)
    try:
        value = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"error decoding JSON: {error}") from error
    return value if request.content_type == patches.JSON_PATCH else _object(value)


def _object(value: Any) -> Object:
    """Return what was sent as an object that has metadata, even if empty."""
    if not isinstance(value, dict):
        raise bad_request("the body is not one object")
    return {**value, "metadata": _part(value, "metadata")}


def _part(value: Object, key: str) -> Object:
    part = value.get(key) or {}
    if not isinstance(part, dict):
        raise bad_request(f"{key} is not an object")
    return part


def _unsupported(request: ApiRequest) -> StatusError:
    # `kubectl create KIND` and typed Go clients send protobuf.
    message = f"{request.content_type or 'no content type'} is not read here; send JSON or YAML"
    return StatusError(415, "UnsupportedMediaType", f"{message}, as kubectl apply does")


def _scale(kind: Kind, made: Object) -> Object:
    paths: Object = kind.scale or {}
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: made["metadata"][key] for key in kept if key in made["metadata"]},
        "spec": {"replicas": find(made, paths["specReplicasPath"]) or 0},
        "status": {"replicas": find(made, paths["statusReplicasPath"]) or 0},
    }


def _rescaled(kind: Kind, before: Object, scale: Object) -> Object:
    change: Any = _part(scale, "spec").get("replicas")
    paths: Object = kind.scale or {}
    for part in reversed(paths["specReplicasPath"].strip(".").split(".")):
        change = {part: change}
    version = {"resourceVersion": scale["metadata"].get("resourceVersion")}
    made: Object = patches.merge(before, {**change, "metadata": version})
    return made

"""All verbs except watch: parses a request, applies it to the store, returns the response."""

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
_MAX_DIGITS = 19  # of a number of 64 bits


@dataclass(frozen=True)
class ApiRequest:
    """A request for objects of one kind.

    Attributes:
        key: Key of the object. An empty namespace means all, an empty name the collection.
        subresource: `status`, `scale` or empty.
        query: Parameters of the URL.
        content_type: Media type of the body, without parameters.
    """

    kind: Kind
    key: Key
    subresource: str
    query: Mapping[str, str]
    content_type: str
    body: bytes

    @property
    def validation(self) -> str:
        """Treatment of unknown fields: `Strict`, `Warn` or `Ignore`."""
        return self.query.get("fieldValidation") or "Warn"

    def number(self, parameter: str) -> int:
        """Return a parameter of the URL as a number; 0 if it is absent.

        Raises:
            StatusError: the parameter is not a whole number of 64 bits.
        """
        text = self.query.get(parameter) or "0"
        if not text.isdecimal() or len(text) > _MAX_DIGITS:
            raise bad_request(
                f"{parameter}: Invalid value: {text}: must be a whole number of 64 bits"
            )
        return int(text)


def parse_request(
    store: Store, path: str, query: Mapping[str, str], content_type: str, body: bytes
) -> ApiRequest | None:
    """Return the request, or None if the path is not served.

    `path` has no leading slash, and `content_type` no parameters.
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
class ApiResponse:
    """Response with an object, an HTTP status, and warnings for the client."""

    obj: Object
    status: int = 200
    warnings: Sequence[str] = ()


def _get(store: Store, request: ApiRequest) -> ApiResponse:
    obj = _stored(store, request)
    return ApiResponse(_scale(request.kind, obj) if request.subresource == "scale" else obj)


def _list(store: Store, request: ApiRequest) -> ApiResponse:
    """Return a page of the objects.

    A page shows the current objects, but all pages have the version of the first page. A watch from
    that version repeats the changes that occurred between the pages, and misses none.
    """
    matches = selects(request.kind, request.key.namespace, request.query)
    items = [obj for obj in store.objects(request.kind) if matches(obj)]
    version = store.version
    if token := request.query.get("continue"):
        try:
            version, *after = orjson.loads(base64.urlsafe_b64decode(token))
        except ValueError as error:
            raise bad_request("continue key is not valid") from error
        if version < store.oldest:
            raise errors.expired(version, store.oldest)
        items = [item for item in items if key_of(item) > Key(*after)]
    metadata: Object = {"resourceVersion": str(version)}
    limit = request.number("limit")
    if 0 < limit < len(items):
        last = key_of(items[limit - 1])
        metadata["continue"] = base64.urlsafe_b64encode(orjson.dumps([version, *last])).decode()
        metadata["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    resource = request.kind.resource
    kind = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
    return ApiResponse({**kind, "metadata": metadata, "items": items})


def _create(store: Store, request: ApiRequest, body: Object) -> ApiResponse:
    kind, resource, namespace = request.kind, request.kind.resource, request.key.namespace
    if resource.namespaced:
        parent = store.get(store.kinds[str(NAMESPACES)], Key("", namespace))
        if parent is None:
            raise errors.not_found(NAMESPACES, namespace)
        if "deletionTimestamp" in parent["metadata"]:
            name = str(body["metadata"].get("name", ""))
            why = f"unable to create new content in namespace {namespace} because it is being"
            message = f'{resource} "{name}" is forbidden: {why} terminated'
            raise StatusError(403, "Forbidden", message, errors.about(resource, name))
    obj, warnings = admit_new(kind, body, namespace, request.key.name, request.validation)
    if store.get(kind, key_of(obj)) is not None:
        name = obj["metadata"]["name"]
        message = f'{resource} "{name}" already exists'
        raise StatusError(409, "AlreadyExists", message, errors.about(resource, name))
    return ApiResponse(obj if "dryRun" in request.query else store.put(kind, obj), 201, warnings)


def _update(store: Store, request: ApiRequest) -> ApiResponse:
    before, body = _stored(store, request), _read(request)
    if request.kind.is_custom and not body["metadata"].get("resourceVersion"):
        finding = Finding(("metadata", "resourceVersion"), "must be specified for an update")
        raise errors.invalid(request.kind.resource, before, [finding])
    return _change(store, request, before, body)


def _patch(store: Store, request: ApiRequest) -> ApiResponse:
    """Patch an object, its status or its scale; an apply may create it."""
    body = _read(request)
    before = store.get(request.kind, request.key)
    if before is None and request.content_type == patches.APPLY and not request.subresource:
        return _create(store, request, _applied(request, {}, body))
    before = _stored(store, request)
    target = _scale(request.kind, before) if request.subresource == "scale" else before
    match request.content_type:
        case patches.MERGE:
            obj = patches.merge(target, body)
        case patches.JSON_PATCH:
            obj = patches.json_patch(target, body)
        case patches.STRATEGIC if not request.kind.is_custom:
            obj = patches.merge(target, body, patches.LIST_KEYS)
        case patches.APPLY:
            obj = _applied(request, target, body)
        case _:
            raise _unsupported(request)
    return _change(store, request, before, _object(obj))


def _applied(request: ApiRequest, live: Object, body: Object) -> Object:
    manager, force = request.query.get("fieldManager", ""), request.query.get("force") == "true"
    obj = patches.apply(live, body, manager, force=force, time=timestamp())
    return {"apiVersion": body.get("apiVersion"), "kind": body.get("kind"), **obj}


def _change(store: Store, request: ApiRequest, before: Object, body: Object) -> ApiResponse:
    kind, is_scale = request.kind, request.subresource == "scale"
    obj, warnings = admit_change(
        kind,
        _rescaled(kind, before, body) if is_scale else body,
        before,
        request.validation,
        is_status=request.subresource == "status",
    )
    if obj is not before and "dryRun" not in request.query:
        obj = store.put(kind, obj)
    return ApiResponse(_scale(kind, obj) if is_scale else obj, 200, warnings)


def _delete(store: Store, request: ApiRequest) -> ApiResponse:
    """Delete an object, or all objects that the selectors match."""
    if not request.key.name:
        listing = _list(store, request)
        for obj in listing.obj["items"]:
            _delete(store, replace(request, key=key_of(obj)))
        return listing
    options = _read(request) if request.body else {}
    policy = options.get("propagationPolicy") or request.query.get("propagationPolicy")
    kind, obj = request.kind, _stored(store, request)
    metadata = obj["metadata"]
    check_preconditions(kind.resource, obj, _part(options, "preconditions"))
    if "dryRun" not in request.query:
        if policy == "Orphan":
            store.orphan(metadata["uid"])
        deleted = store.delete(kind, obj, is_foreground=policy == "Foreground")
        if deleted["metadata"]["finalizers"]:
            return ApiResponse(deleted)
    details = {**errors.about(kind.resource, metadata["name"]), "uid": metadata["uid"]}
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return ApiResponse({**status, "details": details})


VERBS: Mapping[str, Callable[[Store, ApiRequest], ApiResponse]] = {
    "get": _get,
    "list": _list,
    "create": lambda store, request: _create(store, request, _read(request)),
    "update": _update,
    "patch": _patch,
    "delete": _delete,
}
"""Implementations of the verbs; each raises StatusError."""


def _stored(store: Store, request: ApiRequest) -> Object:
    obj = store.get(request.kind, request.key)
    if obj is None:
        raise errors.not_found(request.kind.resource, request.key.name)
    return obj


def _read(request: ApiRequest) -> Any:
    """Return the body as JSON."""
    if request.content_type in (_YAML, patches.APPLY):
        documents = list(read_yaml(request.body.decode(errors="replace"), "the request"))
        for document in documents:
            for problem in [document] if isinstance(document, Problem) else document.problems:
                raise bad_request(f"error decoding YAML: {problem}")
        values = [document.value for document in documents if not isinstance(document, Problem)]
        return _object(values[0] if len(values) == 1 else values)
    if not request.content_type.endswith("json"):
        raise _unsupported(request)
    try:
        value = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"error decoding JSON: {error}") from error
    return value if request.content_type == patches.JSON_PATCH else _object(value)


def _object(value: Any) -> Object:
    """Return the body as an object with metadata, which may be empty."""
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


def _scale(kind: Kind, obj: Object) -> Object:
    paths: Object = kind.scale or {}
    copied = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: obj["metadata"][key] for key in copied if key in obj["metadata"]},
        "spec": {"replicas": find(obj, paths["specReplicasPath"]) or 0},
        "status": {"replicas": find(obj, paths["statusReplicasPath"]) or 0},
    }


def _rescaled(kind: Kind, before: Object, scale: Object) -> Object:
    change: Any = _part(scale, "spec").get("replicas")
    paths: Object = kind.scale or {}
    for part in reversed(paths["specReplicasPath"].strip(".").split(".")):
        change = {part: change}
    version = {"resourceVersion": scale["metadata"].get("resourceVersion")}
    obj: Object = patches.merge(before, {**change, "metadata": version})
    return obj

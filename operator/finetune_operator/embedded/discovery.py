"""What the server publishes about itself and its kinds: versions, discovery, OpenAPI v3.

`kubectl apply` reads in OpenAPI whether a patch of the kind takes `fieldValidation`, so that the
server validates; `kubectl explain` reads the schema. There is no v2: kubectl asks for it only where
v3 is missing.
"""

from collections.abc import Collection, Iterator, Sequence

from finetune_operator.embedded.kinds import Kind
from finetune_operator.kube.resources import Object

_VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0-embedded", "platform": "embedded"}
_VERBS = ("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch")


def answer(kinds: Collection[Kind], parts: Sequence[str]) -> Object | None:
    """Return the answer to a path that names no kind of object, or None; all `kinds` are served."""
    match parts:
        case ["version"]:
            return _VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(_groups(kinds))}
        case ["openapi", "v3"]:
            places = sorted({_place(kind) for kind in kinds})
            links = {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in places}
            return {"paths": links}
        case ["openapi", "v3", *place]:
            here = [kind for kind in kinds if _place(kind) == "/".join(place)]
            return _document(here) if here else None
        case ["api", _] | ["apis", _, _]:
            here = [kind for kind in kinds if _place(kind) == "/".join(parts)]
            return _resource_list(here) if here else None
    return None


def _place(kind: Kind) -> str:
    """Return `api/v1` or `apis/GROUP/VERSION`."""
    return kind.resource.path().removesuffix(f"/{kind.resource.plural}").strip("/")


def _groups(kinds: Collection[Kind]) -> Iterator[Object]:
    versions: dict[str, set[str]] = {}
    for kind in kinds:
        if group := kind.resource.group:
            versions.setdefault(group, set()).add(kind.resource.version)
    for group, there in versions.items():
        listed = [{"groupVersion": f"{group}/{one}", "version": one} for one in sorted(there)]
        yield {"name": group, "versions": listed, "preferredVersion": listed[0]}


def _resource_list(kinds: Sequence[Kind]) -> Object:
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": kinds[0].resource.api_version,
        "resources": [entry for kind in kinds for entry in _entries(kind)],
    }


def _entries(kind: Kind) -> Iterator[Object]:
    resource = kind.resource
    about = {"namespaced": resource.namespaced, "kind": resource.kind}
    listed = {"shortNames": kind.short_names, "categories": kind.categories, "verbs": _VERBS}
    yield {"name": resource.plural, "singularName": resource.kind.lower(), **about, **listed}
    for name in kind.subresources:
        scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
        entry = {"name": f"{resource.plural}/{name}", "singularName": "", **about}
        entry["verbs"] = ("get", "patch", "update")
        yield {**entry, **(scale if name == "scale" else {})}


def _document(kinds: Sequence[Kind]) -> Object:
    paths = {}
    schemas = {}
    for kind in kinds:
        resource = kind.resource
        gvk = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        text = {"in": "query", "schema": {"type": "string"}}
        patch = {
            "parameters": [{"name": name, **text} for name in ("fieldValidation", "dryRun")],
            "responses": {"200": {"description": "OK"}},
            "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": gvk,
        }
        namespace = "{namespace}" if resource.namespaced else None
        paths[resource.path(namespace, "{name}")] = {"patch": patch}
        name = f"{resource.group or 'core'}.{resource.version}.{resource.kind}"
        schemas[name] = {**_shape(kind), "x-kubernetes-group-version-kind": [gvk]}
    return {
        "openapi": "3.0.0",
        "info": {"title": "finetune-operator", "version": "embedded"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _shape(kind: Kind) -> Object:
    """Return the schema as a CRD may say it, or the names of the fields."""
    fields = kind.schema["properties"]
    if kind.is_custom:
        return {**kind.schema, "properties": {**fields, "metadata": {"type": "object"}}}
    return {"type": "object", "properties": {name: {"type": "object"} for name in fields}}

"""Self-description of the server: version, discovery, and OpenAPI v3 of its kinds.

`kubectl apply` checks in OpenAPI whether a patch of the kind accepts `fieldValidation`, so that the
server validates; `kubectl explain` reads the schema. OpenAPI v2 is not served: kubectl requests it
only if v3 is missing.
"""

from collections.abc import Collection, Iterator, Sequence

from finetune_operator.embedded.kinds import Kind
from finetune_operator.kube.resources import Object

_VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0-embedded", "platform": "embedded"}
_VERBS = ("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch")


def describe(kinds: Collection[Kind], parts: Sequence[str]) -> Object | None:
    """Return the response to a discovery path, given as its parts; None for any other path.

    Args:
        kinds: All served kinds.
        parts: The path, split at its slashes.
    """
    match parts:
        case ["version"]:
            return _VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(_groups(kinds))}
        case ["openapi", "v3"]:
            versions = sorted({_version_path(kind) for kind in kinds})
            links = {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in versions}
            return {"paths": links}
        case ["openapi", "v3", *version]:
            matching = [kind for kind in kinds if _version_path(kind) == "/".join(version)]
            return _document(matching) if matching else None
        case ["api", _] | ["apis", _, _]:
            matching = [kind for kind in kinds if _version_path(kind) == "/".join(parts)]
            return _resource_list(matching) if matching else None
    return None


def _version_path(kind: Kind) -> str:
    """Return `api/v1` or `apis/GROUP/VERSION`."""
    return kind.resource.path().removesuffix(f"/{kind.resource.plural}").strip("/")


def _groups(kinds: Collection[Kind]) -> Iterator[Object]:
    versions: dict[str, set[str]] = {}
    for kind in kinds:
        if group := kind.resource.group:
            versions.setdefault(group, set()).add(kind.resource.version)
    for group, served in versions.items():
        listed = [{"groupVersion": f"{group}/{name}", "version": name} for name in sorted(served)]
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
        schemas[name] = {**_published_schema(kind), "x-kubernetes-group-version-kind": [gvk]}
    return {
        "openapi": "3.0.0",
        "info": {"title": "finetune-operator", "version": "embedded"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _published_schema(kind: Kind) -> Object:
    """Return the schema in the form of a CRD, or only the names of the fields."""
    fields = kind.schema["properties"]
    if kind.is_custom:
        return {**kind.schema, "properties": {**fields, "metadata": {"type": "object"}}}
    return {"type": "object", "properties": {name: {"type": "object"} for name in fields}}

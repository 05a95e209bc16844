"""OpenAPI v3 of what is served, as far as kubectl reads it.

`kubectl apply` looks whether a patch of the kind takes `fieldValidation`, so that the server
validates; `kubectl explain` reads the schema. There is no v2: kubectl asks for it only where v3 is
missing.
"""

from collections.abc import Iterable

from finetune_operator.embedded.kinds import Kind
from finetune_operator.kube.resources import Object


def documents(kinds: Iterable[Kind]) -> Object:
    """Return the answer to `/openapi/v3`."""
    places = {_place(kind) for kind in kinds}
    return {"paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in sorted(places)}}


def document(kinds: Iterable[Kind], place: str) -> Object | None:
    """Return the document of one group and version, or None.

    Args:
        kinds: Everything that is served.
        place: `api/v1` or `apis/GROUP/VERSION`.
    """
    here = [kind for kind in kinds if _place(kind) == place]
    if not here:
        return None
    return {
        "openapi": "3.0.0",
        "info": {"title": "finetune-operator", "version": "embedded"},
        "paths": {_path(kind): {"patch": _patch(kind)} for kind in here},
        "components": {"schemas": {_name(kind): _schema(kind) for kind in here}},
    }


def _place(kind: Kind) -> str:
    resource = kind.resource
    return f"apis/{resource.api_version}" if resource.group else f"api/{resource.version}"


def _path(kind: Kind) -> str:
    namespace = "{namespace}" if kind.resource.namespaced else None
    return kind.resource.path(namespace, "{name}")


def _name(kind: Kind) -> str:
    resource = kind.resource
    group = ".".join(reversed(resource.group.split("."))) or "core"
    return f"{group}.{resource.version}.{resource.kind}"


def _gvk(kind: Kind) -> Object:
    resource = kind.resource
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _patch(kind: Kind) -> Object:
    text = {"in": "query", "schema": {"type": "string"}}
    return {
        "parameters": [{"name": name, **text} for name in ("fieldValidation", "dryRun")],
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": _gvk(kind),
    }


def _schema(kind: Kind) -> Object:
    if kind.is_custom:
        return {**kind.shape, "x-kubernetes-group-version-kind": [_gvk(kind)]}
    fields = {name: {"type": "object"} for name in kind.shape["properties"]}
    return {"type": "object", "properties": fields, "x-kubernetes-group-version-kind": [_gvk(kind)]}

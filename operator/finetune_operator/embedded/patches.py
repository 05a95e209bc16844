"""The four kinds of patches, as pure functions of an object and a patch.

Simplifications: a strategic merge looks up the merge key of a list by the name of the field; an
apply treats a list as one value, and detects conflicts between appliers only.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from finetune_operator.api.paths import show_path
from finetune_operator.embedded.status_errors import StatusError, bad_request
from finetune_operator.kube.resources import Object

MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"

LIST_KEYS = {
    "conditions": "type", "containers": "name", "env": "name", "imagePullSecrets": "name",
    "initContainers": "name", "ownerReferences": "uid", "secrets": "name", "taints": "key",
    "volumeMounts": "mountPath", "volumes": "name",
}  # fmt: skip
"""Merge key of a list in a strategic merge, by the list's field."""

_NAMING = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "managedFields")
_Path = tuple[str, ...]


def merge(target: Any, patch: Any, list_keys: Mapping[str, str] | None = None) -> Any:
    """Return a copy of `target` after a JSON merge patch (RFC 7386).

    With `list_keys` the patch is a strategic merge: lists in these fields are merged item by item;
    the directives for orders and unions, which start with `$`, are ignored.
    """
    if not isinstance(patch, dict):
        return patch
    obj = dict(target) if isinstance(target, dict) else {}
    for field, value in patch.items():
        if value is None:
            obj.pop(field, None)
        elif list_keys and field in list_keys and isinstance(value, list):
            obj[field] = _merged_list(obj.get(field), value, list_keys[field], list_keys)
        elif not (list_keys and field.startswith("$")):
            obj[field] = merge(obj.get(field), value, list_keys)
    return obj


def _merged_list(target: Any, patch: list[Any], by: str, list_keys: Mapping[str, str]) -> Any:
    existing = target if isinstance(target, list) else []
    if not all(isinstance(item, dict) for item in (*existing, *patch)):
        return patch
    merged = {item.get(by): item for item in existing}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item.get(by), None)
        else:
            merged[item.get(by)] = merge(merged.get(item.get(by)), item, list_keys)
    return list(merged.values())


def json_patch(target: Object, patch: Any) -> Object:
    """Return `target` after a JSON patch (RFC 6902).

    Raises:
        StatusError: an operation cannot be applied, or a test fails.
    """
    import jsonpatch

    try:
        obj: Object = jsonpatch.apply_patch(target, patch)
    except (
        jsonpatch.JsonPatchException,
        jsonpatch.JsonPointerException,
        TypeError,
        ValueError,  # a patch that is text is read as JSON
    ) as error:
        message = "the server rejected our request due to an error in our request"
        raise StatusError(422, "Invalid", message) from error
    return obj


def apply(live: Object, wanted: Object, manager: str, *, force: bool, time: str) -> Object:
    """Return `live` after a server-side apply of `wanted`, with its managedFields.

    Fields that the manager applied earlier and now omits are removed, unless another manager has
    applied them too.

    Raises:
        StatusError: the manager is empty, or another manager applied a field with another value.
    """
    if not manager:
        raise bad_request("fieldManager: Required value: is required for apply patch")
    metadata = {key: value for key, value in wanted["metadata"].items() if key not in _NAMING}
    content = {k: v for k, v in wanted.items() if k not in ("apiVersion", "kind", "metadata")}
    if metadata:
        content["metadata"] = metadata
    entries = {
        entry["manager"]: entry
        for entry in live.get("metadata", {}).get("managedFields", ())
        if "manager" in entry and "fieldsV1" in entry
    }
    applied = {name: _read_fields(entry["fieldsV1"]) for name, entry in entries.items()}
    owned, fields = applied.pop(manager, set()), set(_leaves(content))
    obj = merge(live, content)
    before, after = _leaves(live), _leaves(obj)
    changed = {path for path in fields if before.get(path) != after.get(path)}
    for name, paths in applied.items():
        if (conflicts := changed & _with_parents(paths)) and not force:
            raise _conflict(name, sorted(conflicts))
        applied[name] = {path for path in paths if not _with_parents([path]) & conflicts}
    retained = _with_parents(fields.union(*applied.values()))
    for path in owned - retained:
        obj = _without(obj, path)
    if owned == fields and obj == live:
        return live
    applied[manager] = fields
    entries[manager] = {
        "manager": manager, "operation": "Apply", "apiVersion": wanted.get("apiVersion"),
        "time": time, "fieldsType": "FieldsV1",
    }  # fmt: skip
    managed = [{**entries[name], "fieldsV1": _fields(paths)} for name, paths in applied.items()]
    result: Object = merge(obj, {"metadata": {"managedFields": managed}})
    return result


def _leaves(value: Any, path: _Path = ()) -> dict[_Path, Any]:
    """Return the values in nested mappings that are not mappings, or are empty mappings."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[_Path, Any] = {}
    for key, inner in value.items():
        found |= _leaves(inner, (*path, key))
    return found


def _with_parents(paths: Iterable[_Path]) -> set[_Path]:
    return {path[:length] for path in paths for length in range(len(path) + 1)}


def _fields(paths: Iterable[_Path]) -> Object:
    """Return paths in the format of managedFields: `{"f:spec": {"f:suspend": {}}}`."""
    fields: Object = {}
    for path in paths:
        reduce(lambda parent, part: parent.setdefault(f"f:{part}", {}), path, fields)
    return fields


def _read_fields(fields: Object) -> set[_Path]:
    return {tuple(part.removeprefix("f:") for part in path) for path in _leaves(fields)}


def _without(value: Any, path: _Path) -> Any:
    """Return a mapping without a field, and without the mappings that become empty."""
    if not isinstance(value, dict) or path[0] not in value:
        return value
    rest = {key: inner for key, inner in value.items() if key != path[0]}
    inner = _without(value[path[0]], path[1:]) if path[1:] else None
    return rest if inner in (None, {}) else {**rest, path[0]: inner}


def _conflict(manager: str, paths: list[_Path]) -> StatusError:
    shown = [f".{show_path(path)}" for path in paths]
    count = "1 conflict" if len(shown) == 1 else f"{len(shown)} conflicts"
    listed = shown[0] if len(shown) == 1 else "\n" + "\n".join(f"- {field}" for field in shown)
    message = f'Apply failed with {count}: conflict with "{manager}": {listed}'
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{manager}"', "field": field}
        for field in shown
    ]
    return StatusError(409, "Conflict", message, {"causes": causes})

"""The four kinds of patches; pure functions of an object and a patch.

Simplified: a strategic merge finds the merge key of a list by its field's name, and an apply takes
a list as one value and finds conflicts between appliers only.
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

    With `list_keys` it is a strategic merge: lists of these fields are merged item by item; the
    directives for orders and unions, which start with `$`, are ignored.
    """
    if not isinstance(patch, dict):
        return patch
    made = dict(target) if isinstance(target, dict) else {}
    for field, value in patch.items():
        if value is None:
            made.pop(field, None)
        elif list_keys and field in list_keys and isinstance(value, list):
            made[field] = _merged_list(made.get(field), value, list_keys[field], list_keys)
        elif not (list_keys and field.startswith("$")):
            made[field] = merge(made.get(field), value, list_keys)
    return made


def _merged_list(target: Any, patch: list[Any], by: str, list_keys: Mapping[str, str]) -> Any:
    there = target if isinstance(target, list) else []
    if not all(isinstance(one, dict) for one in (*there, *patch)):
        return patch
    made = {one.get(by): one for one in there}
    for one in patch:
        if one.get("$patch") == "delete":
            made.pop(one.get(by), None)
        else:
            made[one.get(by)] = merge(made.get(one.get(by)), one, list_keys)
    return list(made.values())


def json_patch(target: Object, patch: Any) -> Object:
    """Return `target` after a JSON patch (RFC 6902).

    Raises:
        StatusError: an operation cannot be done, or a test fails.
    """
    import jsonpatch

    try:
        made: Object = jsonpatch.apply_patch(target, patch)
    except (
        jsonpatch.JsonPatchException,
        jsonpatch.JsonPointerException,
        TypeError,
        ValueError,  # a patch that is text is read as JSON
    ) as error:
        message = "the server rejected our request due to an error in our request"
        raise StatusError(422, "Invalid", message) from error
    return made


def apply(live: Object, wanted: Object, manager: str, *, force: bool, time: str) -> Object:
    """Return `live` after a server-side apply of `wanted`, with its managedFields.

    What the manager applied before and leaves out now is removed, unless another applied it too.

    Raises:
        StatusError: there is no manager, or another manager applied a field with another value.
    """
    if not manager:
        raise bad_request("fieldManager: Required value: is required for apply patch")
    metadata = {key: value for key, value in wanted["metadata"].items() if key not in _NAMING}
    said = {k: v for k, v in wanted.items() if k not in ("apiVersion", "kind", "metadata")}
    if metadata:
        said["metadata"] = metadata
    entries = {
        one["manager"]: one
        for one in live.get("metadata", {}).get("managedFields", ())
        if "manager" in one and "fieldsV1" in one
    }
    applied = {name: _read_fields(one["fieldsV1"]) for name, one in entries.items()}
    mine, fields = applied.pop(manager, set()), set(_leaves(said))
    made = merge(live, said)
    before, after = _leaves(live), _leaves(made)
    contested = {path for path in fields if before.get(path) != after.get(path)}
    for name, paths in applied.items():
        if (lost := contested & _with_parents(paths)) and not force:
            raise _conflict(name, sorted(lost))
        applied[name] = {path for path in paths if not _with_parents([path]) & lost}
    kept = _with_parents(fields.union(*applied.values()))
    for path in mine - kept:
        made = _without(made, path)
    if mine == fields and made == live:
        return live
    applied[manager] = fields
    entries[manager] = {
        "manager": manager, "operation": "Apply", "apiVersion": wanted.get("apiVersion"),
        "time": time, "fieldsType": "FieldsV1",
    }  # fmt: skip
    managed = [{**entries[name], "fieldsV1": _fields(paths)} for name, paths in applied.items()]
    result: Object = merge(made, {"metadata": {"managedFields": managed}})
    return result


def _leaves(value: Any, path: _Path = ()) -> dict[_Path, Any]:
    """Return the values in nested mappings that are none themselves, or are empty ones."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[_Path, Any] = {}
    for key, inner in value.items():
        found |= _leaves(inner, (*path, key))
    return found


def _with_parents(paths: Iterable[_Path]) -> set[_Path]:
    return {path[:length] for path in paths for length in range(len(path) + 1)}


def _fields(paths: Iterable[_Path]) -> Object:
    """Write paths as managedFields does: `{"f:spec": {"f:suspend": {}}}`."""
    made: Object = {}
    for path in paths:
        reduce(lambda place, part: place.setdefault(f"f:{part}", {}), path, made)
    return made


def _read_fields(fields: Object) -> set[_Path]:
    return {tuple(part.removeprefix("f:") for part in path) for path in _leaves(fields)}


def _without(value: Any, path: _Path) -> Any:
    """Return a mapping without one field, and without the mappings that this leaves empty."""
    if not isinstance(value, dict) or path[0] not in value:
        return value
    rest = {key: inner for key, inner in value.items() if key != path[0]}
    inner = _without(value[path[0]], path[1:]) if path[1:] else None
    return rest if inner in (None, {}) else {**rest, path[0]: inner}


def _conflict(manager: str, paths: list[_Path]) -> StatusError:
    shown = [f".{show_path(path)}" for path in paths]
    count = "1 conflict" if len(shown) == 1 else f"{len(shown)} conflicts"
    said = shown[0] if len(shown) == 1 else "\n" + "\n".join(f"- {one}" for one in shown)
    message = f'Apply failed with {count}: conflict with "{manager}": {said}'
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{manager}"', "field": one}
        for one in shown
    ]
    return StatusError(409, "Conflict", message, {"causes": causes})

"""The four kinds of patches; pure functions of an object and a patch.

Simplified: a strategic merge knows the merge keys of lists by their field's name, and an apply
takes a list as one value and looks for conflicts among appliers only.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from finetune_operator.api.paths import show_path
from finetune_operator.embedded.refusals import RefusalError, bad_request
from finetune_operator.kube.resources import Object

MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"

_MERGE_KEYS = {
    "conditions": "type", "containers": "name", "env": "name", "imagePullSecrets": "name",
    "initContainers": "name", "ownerReferences": "uid", "secrets": "name", "taints": "key",
    "volumeMounts": "mountPath", "volumes": "name",
}  # fmt: skip

Fields = dict[str, Any]
"""Fields as managedFields writes them: `{"f:spec": {"f:suspend": {}}}`."""


def merge(target: Any, patch: Any) -> Any:
    """Return `target` after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    made = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merge(made.get(key), value)
    return made


def json_patch(target: Object, patch: Any) -> Object:
    """Return `target` after a JSON patch (RFC 6902).

    Raises:
        RefusalError: an operation cannot be done, or a test fails.
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
        raise RefusalError(422, "Invalid", message) from error
    return made


def strategic(target: Any, patch: Any, field: str = "") -> Any:
    """Return `target` after a strategic merge patch."""
    if isinstance(patch, list) and field in _MERGE_KEYS:
        there = target if isinstance(target, list) else []
        if all(isinstance(one, dict) for one in (*there, *patch)):
            return _strategic_list(there, patch, _MERGE_KEYS[field])
    if not isinstance(patch, dict):
        return patch
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    made = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            listed = key.split("/", 1)[1]
            made[listed] = [one for one in made.get(listed, ()) if one not in value]
        elif key.startswith("$"):
            continue  # orders and unions, which nobody here reads
        elif value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
            made.pop(key, None)
        else:
            made[key] = strategic(made.get(key), value, key)
    return made


def _strategic_list(target: list[Any], patch: list[Any], by: str) -> list[Any]:
    made = {one.get(by): one for one in target}
    for one in patch:
        if one.get("$patch") == "delete":
            made.pop(one.get(by), None)
        else:
            made[one.get(by)] = strategic(made.get(one.get(by)), one)
    return list(made.values())


def apply(live: Object, wanted: Object, manager: str, *, force: bool, time: str) -> Object:
    """Return `live` after a server-side apply of `wanted`, with its managedFields.

    What the manager applied before and leaves out now is removed, unless another applied it too.

    Raises:
        RefusalError: there is no manager, or another manager applied a field with another value.
    """
    if not manager:
        raise bad_request("fieldManager: Required value: is required for apply patch")
    metadata = {k: v for k, v in wanted["metadata"].items() if k not in _NAMING}
    said = {k: v for k, v in wanted.items() if k not in ("apiVersion", "kind", "metadata")}
    said |= {"metadata": metadata} if metadata else {}
    known = live.get("metadata", {}).get("managedFields", [])
    entries = [one for one in known if one.get("manager") and "fieldsV1" in one]
    others = [dict(one) for one in entries if one["manager"] != manager]
    mine = [one for one in entries if one["manager"] == manager]
    fields = _fields(said)
    made = merge(deepcopy(live), said)
    contested = [path for path in _leaves(fields) if _value(live, path) != _value(made, path)]
    for entry in others:
        lost = [path for path in contested if _holds(entry["fieldsV1"], path)]
        if lost and not force:
            raise _conflict(entry["manager"], lost)
        entry["fieldsV1"] = _without(entry["fieldsV1"], lost)
    for entry in mine:
        for path in _leaves(entry["fieldsV1"]):
            if not _holds(fields, path) and not any(
                _holds(one["fieldsV1"], path) for one in others
            ):
                _drop(made, path)
    entry = {
        "manager": manager, "operation": "Apply", "apiVersion": wanted.get("apiVersion"),
        "time": time, "fieldsType": "FieldsV1", "fieldsV1": fields,
    }  # fmt: skip
    is_same = mine and {**mine[0], "time": time} == entry and made == live
    made.setdefault("metadata", {})["managedFields"] = [*others, mine[0] if is_same else entry]
    result: Object = made
    return result


_NAMING = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "managedFields")
_Path = tuple[str, ...]


def _fields(value: Mapping[str, Any]) -> Fields:
    return {
        f"f:{key}": _fields(inner) if isinstance(inner, dict) else {}
        for key, inner in value.items()
    }


def _leaves(fields: Fields, path: _Path = ()) -> Iterator[_Path]:
    for key, inner in fields.items():
        here = (*path, key.removeprefix("f:"))
        if inner:
            yield from _leaves(inner, here)
        else:
            yield here


def _holds(fields: Fields, path: _Path) -> bool:
    for part in path:
        if f"f:{part}" not in fields:
            return False
        fields = fields[f"f:{part}"]
    return True


def _without(fields: Fields, paths: list[_Path]) -> Fields:
    made = deepcopy(fields)
    for path in paths:
        _drop(made, tuple(f"f:{part}" for part in path))
    return made


def _drop(value: Any, path: _Path) -> None:
    """Remove a field, and the mappings it leaves empty."""
    places = [value]
    for part in path[:-1]:
        if not isinstance(places[-1], dict) or part not in places[-1]:
            return
        places.append(places[-1][part])
    if not isinstance(places[-1], dict):
        return
    places[-1].pop(path[-1], None)
    for part, place in zip(reversed(path[:-1]), reversed(places[:-1]), strict=True):
        if not place[part]:
            del place[part]


def _value(value: Any, path: _Path) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _conflict(manager: str, paths: list[_Path]) -> RefusalError:
    shown = [f".{show_path(path)}" for path in paths]
    count = "1 conflict" if len(shown) == 1 else f"{len(shown)} conflicts"
    said = shown[0] if len(shown) == 1 else "\n" + "\n".join(f"- {one}" for one in shown)
    message = f'Apply failed with {count}: conflict with "{manager}": {said}'
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{manager}"', "field": one}
        for one in shown
    ]
    return RefusalError(409, "Conflict", message, {"causes": causes})

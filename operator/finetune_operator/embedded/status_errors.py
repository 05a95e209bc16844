"""Errors in the API server's words: one exception, answered as a `Status` object."""

from collections.abc import Sequence
from functools import reduce
from operator import getitem
from typing import Any

from finetune_operator.api.paths import FieldPath, Finding, show_path, show_value
from finetune_operator.kube.resources import Object, Resource


class StatusError(Exception):
    """A request that is not served.

    Attributes:
        code: HTTP status.
        status: The `Status` object of the answer.
    """

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status: Object = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "details": details or {}, "code": code,
        }  # fmt: skip


def about(resource: Resource, name: str, kind: str | None = None) -> Object:
    """Return the details of a `Status` that name the object; `kind` is the plural by default."""
    group = {"group": resource.group} if resource.group else {}
    return {"name": name, **group, "kind": kind or resource.plural}


def not_found(resource: Resource, name: str) -> StatusError:
    """Return the 404 for an object."""
    message = f'{resource} "{name}" not found'
    return StatusError(404, "NotFound", message, about(resource, name))


def conflict(resource: Resource, name: str, why: str) -> StatusError:
    """Return the 409 for a precondition that does not hold."""
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return StatusError(409, "Conflict", message, about(resource, name))


def bad_request(message: str) -> StatusError:
    """Return the 400 for what cannot be read."""
    return StatusError(400, "BadRequest", message)


def unreadable(resource: Resource, why: str) -> StatusError:
    """Return the 400 for a body that is no object of the kind, or not strictly one."""
    kind = resource.kind
    return bad_request(
        f'{kind} in version "{resource.version}" cannot be handled as a {kind}: {why}'
    )


def expired(version: int, oldest: int) -> StatusError:
    """Return the 410 for a version that is no longer in the history."""
    return StatusError(410, "Expired", f"too old resource version: {version} ({oldest})")


def invalid(resource: Resource, made: Object, findings: Sequence[Finding]) -> StatusError:
    """Return the 422 for an object that breaks its schema or rules."""
    name = str(made["metadata"].get("name", ""))
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    causes = [_cause(found, made) for found in findings]
    sentences = [f"{cause['field']}: {cause['message']}" for cause in causes]
    said = sentences[0] if len(sentences) == 1 else f"[{', '.join(sentences)}]"
    details = {**about(resource, name, resource.kind), "causes": causes}
    return StatusError(422, "Invalid", f'{kind} "{name}" is invalid: {said}', details)


def _cause(found: Finding, made: Object) -> Object:
    value = show_value(_at(made, found.path))
    reason = "FieldValueInvalid"
    message = f"Invalid value: {value}: {found.message.removeprefix(f'{value} ')}"
    if found.message.startswith(("is missing", "Required value")):
        reason = "FieldValueRequired"
        message = found.message if found.message.startswith("Required") else "Required value"
    return {"reason": reason, "message": message, "field": show_path(found.path)}


def _at(made: Object, path: FieldPath) -> Any:
    try:
        return reduce(getitem, path, made)  # type: ignore[arg-type]
    except (IndexError, KeyError, TypeError):
        return None

"""Errors with the API server's messages: one exception, whose response is a `Status` object."""

from collections.abc import Sequence
from functools import reduce
from operator import getitem
from typing import Any

from finetune_operator.api.paths import FieldPath, Finding, show_path, show_value
from finetune_operator.kube.resources import Object, Resource


class StatusError(Exception):
    """A request that failed.

    Attributes:
        code: HTTP status.
        status: The `Status` object of the response.
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
    """Return the 409 for a failed precondition."""
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return StatusError(409, "Conflict", message, about(resource, name))


def bad_request(message: str) -> StatusError:
    """Return the 400 for a request that cannot be parsed."""
    return StatusError(400, "BadRequest", message)


def unreadable(resource: Resource, why: str) -> StatusError:
    """Return the 400 for a body that is not a valid object of the kind."""
    kind = resource.kind
    return bad_request(
        f'{kind} in version "{resource.version}" cannot be handled as a {kind}: {why}'
    )


def expired(version: int, oldest: int) -> StatusError:
    """Return the 410 for a version that is no longer in the history."""
    return StatusError(410, "Expired", f"too old resource version: {version} ({oldest})")


def invalid(resource: Resource, obj: Object, findings: Sequence[Finding]) -> StatusError:
    """Return the 422 for an object that violates its schema or rules."""
    name = str(obj["metadata"].get("name", ""))
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    causes = [_cause(found, obj) for found in findings]
    sentences = [f"{cause['field']}: {cause['message']}" for cause in causes]
    listed = sentences[0] if len(sentences) == 1 else f"[{', '.join(sentences)}]"
    details = {**about(resource, name, resource.kind), "causes": causes}
    return StatusError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', details)


def _cause(found: Finding, obj: Object) -> Object:
    value = show_value(_at(obj, found.path))
    reason = "FieldValueInvalid"
    message = f"Invalid value: {value}: {found.message.removeprefix(f'{value} ')}"
    if found.message.startswith(("is missing", "Required value")):
        reason = "FieldValueRequired"
        message = found.message if found.message.startswith("Required") else "Required value"
    return {"reason": reason, "message": message, "field": show_path(found.path)}


def _at(obj: Object, path: FieldPath) -> Any:
    try:
        return reduce(getitem, path, obj)  # type: ignore[arg-type]
    except (IndexError, KeyError, TypeError):
        return None

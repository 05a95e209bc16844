"""Refusals as the API server words them: one exception, answered as a `Status` object."""

from collections.abc import Sequence
from typing import Any

from finetune_operator.api.paths import Finding, show_path, show_value
from finetune_operator.kube.resources import Object, Resource


class RefusalError(Exception):
    """A request that is not served.

    Attributes:
        code: HTTP status.
        status: The `Status` object of the answer.
        retry_after: Seconds the client is asked to wait; None says nothing.
    """

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Object | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": details or {},
            "code": code,
        }


def _about(resource: Resource, name: str, kind: str | None = None) -> Object:
    group = {"group": resource.group} if resource.group else {}
    return {"name": name, **group, "kind": kind or resource.plural}


def not_found(resource: Resource, name: str) -> RefusalError:
    """Return the 404 for an object."""
    message = f'{resource} "{name}" not found'
    return RefusalError(404, "NotFound", message, _about(resource, name))


def already_exists(resource: Resource, name: str) -> RefusalError:
    """Return the 409 for a name that is taken."""
    message = f'{resource} "{name}" already exists'
    return RefusalError(409, "AlreadyExists", message, _about(resource, name))


def conflict(resource: Resource, name: str, why: str = "") -> RefusalError:
    """Return the 409 for a precondition that does not hold; by default the resourceVersion's."""
    why = why or (
        "the object has been modified; please apply your changes to the latest version and try "
        "again"
    )
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return RefusalError(409, "Conflict", message, _about(resource, name))


def terminating(resource: Resource, name: str, namespace: str) -> RefusalError:
    """Return the 403 for a creation in a namespace that is being deleted."""
    message = (
        f'{resource} "{name}" is forbidden: unable to create new content in namespace {namespace} '
        "because it is being terminated"
    )
    return RefusalError(403, "Forbidden", message, _about(resource, name))


def bad_request(message: str) -> RefusalError:
    """Return the 400 for what cannot be read."""
    return RefusalError(400, "BadRequest", message)


def unreadable(resource: Resource, why: str) -> RefusalError:
    """Return the 400 for a body that is no object of the kind, or not strictly one."""
    kind = resource.kind
    return bad_request(
        f'{kind} in version "{resource.version}" cannot be handled as a {kind}: {why}'
    )


def expired(version: int, oldest: int) -> RefusalError:
    """Return the 410 for a version that is not remembered any more."""
    return RefusalError(410, "Expired", f"too old resource version: {version} ({oldest})")


def invalid(resource: Resource, made: Object, findings: Sequence[Finding]) -> RefusalError:
    """Return the 422 for an object that breaks its schema or rules."""
    name = str(made["metadata"].get("name", ""))
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    causes = [_cause(found, made) for found in findings]
    sentences = [f"{cause['field']}: {cause['message']}" for cause in causes]
    said = sentences[0] if len(sentences) == 1 else f"[{', '.join(sentences)}]"
    details = {**_about(resource, name, resource.kind), "causes": causes}
    return RefusalError(422, "Invalid", f'{kind} "{name}" is invalid: {said}', details)


def _cause(found: Finding, made: Object) -> Object:
    field, shown = show_path(found.path), show_value(_at(made, found.path))
    if found.message.startswith("is missing"):
        return {"reason": "FieldValueRequired", "message": "Required value", "field": field}
    if found.message.startswith("Required value"):
        return {"reason": "FieldValueRequired", "message": found.message, "field": field}
    why = found.message.removeprefix(f"{shown} ")
    message = f"Invalid value: {shown}: {why}"
    return {"reason": "FieldValueInvalid", "message": message, "field": field}


def _at(value: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        if isinstance(value, dict):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part]
        else:
            return None
    return value

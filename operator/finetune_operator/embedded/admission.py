"""Admit an object to the store: metadata, defaults and validation.

The rules are the same as in `ftctl validate`: defaults, structure and CEL rules of a CRD. Pure
functions; each returns the object to store, and warnings for the client.
"""

import secrets
import uuid
from typing import Any

from finetune_operator.api.cel import check_rules
from finetune_operator.api.defaults import with_defaults
from finetune_operator.api.metadata import check_metadata, is_dns_label, is_subdomain
from finetune_operator.api.paths import Finding, show_path
from finetune_operator.api.structural import check_structure
from finetune_operator.embedded.kinds import Kind, accepted
from finetune_operator.embedded.status_errors import bad_request, conflict, invalid, unreadable
from finetune_operator.embedded.store import timestamp
from finetune_operator.kube.resources import CRDS, NAMESPACES, Object, Resource

Admitted = tuple[Object, list[str]]

_NAME = ("metadata", "name")
_PREFIX_LENGTH = 58  # maximum of a generated name, to which 5 characters are appended
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, so no words
_SERVER_FIELDS = (
    "name", "namespace", "uid", "creationTimestamp", "generation", "deletionTimestamp",
    "deletionGracePeriodSeconds", "resourceVersion",
)  # fmt: skip


def admit_new(kind: Kind, body: Object, namespace: str, name: str, validation: str) -> Admitted:
    """Return the object to create.

    Args:
        kind: Kind of the object.
        body: The object in the request.
        namespace: Namespace in the URL; empty for cluster-scoped kinds.
        name: Name in the URL; empty if the URL has none.
        validation: Treatment of unknown fields: `Strict`, `Warn` or `Ignore`.

    Raises:
        StatusError: 400 or 422.
    """
    sent = body["metadata"]
    if (sent.get("namespace") or namespace) != namespace:
        raise bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    name = name or sent.get("name") or _generated(sent.get("generateName"))
    if not name:
        missing = "Required value: name or generateName is required"
        raise invalid(kind.resource, body, [Finding(_NAME, missing)])
    obj, warnings = _without_unknown_fields(kind, body, validation)
    metadata = {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
    if namespace:
        metadata["namespace"] = namespace
    if kind.has_status or kind.is_custom:
        metadata["generation"] = 1
    return _validated(kind, _with_server_fields(kind, obj, {"metadata": metadata})), warnings


def _generated(prefix: Any) -> str:
    if not prefix:
        return ""
    return str(prefix)[:_PREFIX_LENGTH] + "".join(secrets.choice(_SUFFIX) for _ in range(5))


def admit_change(
    kind: Kind, body: Object, before: Object, validation: str, *, is_status: bool = False
) -> Admitted:
    """Return the object that replaces `before`, or `before` itself if it is unchanged.

    Args:
        kind: Kind of the object.
        body: The object in the request, or the patched object.
        before: The stored object.
        validation: Treatment of unknown fields: `Strict`, `Warn` or `Ignore`.
        is_status: Change only the status; False: everything except the status.

    Raises:
        StatusError: 400, 409 or 422.
    """
    sent, old = body["metadata"], before["metadata"]
    if sent.get("name", old["name"]) != old["name"]:
        raise bad_request(
            f"the name of the object ({sent['name']}) does not match the name on the URL "
            f"({old['name']})"
        )
    check_preconditions(kind.resource, before, {key: value for key, value in sent.items() if value})
    obj, warnings = _without_unknown_fields(kind, body, validation)
    if is_status:
        obj = {**before, "status": obj.get("status", {})}
    else:
        obj = _with_server_fields(kind, obj, before)
    obj = _validated(kind, obj, before)
    added = set(obj["metadata"].get("finalizers", ())) - set(old.get("finalizers", ()))
    if "deletionTimestamp" in old and added:
        why = "no new finalizers can be added if the object is being deleted"
        raise invalid(kind.resource, obj, [Finding(("metadata", "finalizers"), why)])
    if obj == before:
        return before, warnings
    if "generation" in old and _desired(obj) != _desired(before):
        obj["metadata"]["generation"] = old["generation"] + 1
    return obj, warnings


def _with_server_fields(kind: Kind, sent: Object, stored: Object) -> Object:
    """Return the object of the client with the stored server fields and, as subresource, status."""
    given = {k: v for k, v in sent["metadata"].items() if v and k not in _SERVER_FIELDS}
    own = {key: stored["metadata"][key] for key in _SERVER_FIELDS if key in stored["metadata"]}
    obj = {**sent, "metadata": {**given, **own}}
    if kind.has_status:
        obj.pop("status", None)
        obj |= {"status": stored["status"]} if "status" in stored else {}
    return obj


def check_preconditions(resource: Resource, obj: Object, wanted: Object) -> None:
    """Check the uid and resourceVersion in a change or a deletion against the stored object.

    Raises:
        StatusError: 409.
    """
    metadata = obj["metadata"]
    uid = wanted.get("uid", metadata["uid"])
    if uid != metadata["uid"]:
        raise conflict(
            resource,
            metadata["name"],
            f"the UID in the precondition ({uid}) does not match the UID in record "
            f"({metadata['uid']}). The object might have been deleted and then recreated",
        )
    if wanted.get("resourceVersion", metadata["resourceVersion"]) != metadata["resourceVersion"]:
        raise conflict(
            resource,
            metadata["name"],
            "the object has been modified; please apply your changes to the latest version and "
            "try again",
        )


def _without_unknown_fields(kind: Kind, body: Object, validation: str) -> Admitted:
    """Return a copy of the object without unknown fields."""
    resource = kind.resource
    typed = {"apiVersion": resource.api_version, "kind": resource.kind}
    for key, value in typed.items():
        if body.get(key, value) != value:
            raise bad_request(f"the {key} in the data ({body[key]}) is not the expected {value}")
    obj = with_defaults({**typed, **body}, kind.schema)
    findings = check_structure(obj, kind.schema)
    for finding in findings:
        is_metadata = finding.path[:1] == ("metadata",) and not finding.is_unknown
        # The server replaces its own fields without reading them, and may generate the name.
        if is_metadata and (finding.path != _NAME or "name" in obj["metadata"]):
            raise unreadable(resource, f"{show_path(finding.path)} {finding.message}")
    if invalid_metadata := check_metadata(obj["metadata"]):
        raise invalid(resource, obj, invalid_metadata)
    unknown = [finding.path for finding in findings if finding.is_unknown]
    warnings = [f'unknown field "{show_path(path)}"' for path in unknown]
    if warnings and validation == "Strict":
        raise unreadable(resource, f"strict decoding error: {', '.join(warnings)}")
    for path in unknown:
        parent: Any = obj
        for part in path[:-1]:
            parent = parent[part]
        del parent[path[-1]]
    return obj, warnings if validation == "Warn" else []


def _validated(kind: Kind, obj: Object, before: Object | None = None) -> Object:
    """Return the object with its defaults.

    Raises:
        StatusError: the object violates its schema or its rules.
    """
    obj = with_defaults(obj, kind.schema)
    findings = check_structure(obj, kind.schema)
    if findings and not kind.is_custom:
        why = f"{show_path(findings[0].path)} {findings[0].message}"
        raise unreadable(kind.resource, why)
    findings += _name_findings(kind, str(obj["metadata"]["name"]))
    old = {} if before is None else {"old": before}
    findings += check_rules(obj, kind.schema, findings, **old)
    if findings:
        raise invalid(kind.resource, obj, findings)
    return accepted(obj) if kind.resource == CRDS else obj


def _name_findings(kind: Kind, name: str) -> list[Finding]:
    is_namespace = kind.resource == NAMESPACES
    if is_dns_label(name) if is_namespace else is_subdomain(name):
        return []
    form, example = ("label", "example") if is_namespace else ("subdomain", "example.com")
    why = f"a lowercase RFC 1123 {form} is needed, such as {example}"
    return [Finding(_NAME, why)]


def _desired(obj: Object) -> Object:
    return {key: value for key, value in obj.items() if key not in ("metadata", "status")}

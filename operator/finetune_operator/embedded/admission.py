"""Admit an object to the store: its metadata, defaults and checks.

The rules are those of `ftctl validate`: a CRD's defaults, its structure, its CEL. Pure functions;
each returns the object to store, and warnings for the client.
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
_LONGEST_START = 58  # of a generated name, which has 5 characters more
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, so no words
_SERVERS_OWN = (
    "name", "namespace", "uid", "creationTimestamp", "generation", "deletionTimestamp",
    "deletionGracePeriodSeconds", "resourceVersion",
)  # fmt: skip


def admit_new(kind: Kind, body: Object, namespace: str, name: str, validation: str) -> Admitted:
    """Return the object to create.

    Args:
        kind: Its kind.
        body: What was sent.
        namespace: The URL's; empty for cluster-scoped kinds.
        name: Its name where the URL says it, else empty.
        validation: `Strict`, `Warn` or `Ignore` unknown fields.

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
    made, warnings = _known(kind, body, validation)
    metadata = {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
    if namespace:
        metadata["namespace"] = namespace
    if kind.has_status or kind.is_custom:
        metadata["generation"] = 1
    return _checked(kind, _composed(kind, made, {"metadata": metadata})), warnings


def _generated(start: Any) -> str:
    if not start:
        return ""
    return str(start)[:_LONGEST_START] + "".join(secrets.choice(_SUFFIX) for _ in range(5))


def admit_change(
    kind: Kind, body: Object, before: Object, validation: str, *, is_status: bool = False
) -> Admitted:
    """Return the object to store in place of `before`, or `before` itself where nothing changes.

    Args:
        kind: Its kind.
        body: What was sent, or what a patch has made.
        before: The object as it is stored.
        validation: `Strict`, `Warn` or `Ignore` unknown fields.
        is_status: Only the status is changed, else everything but the status.

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
    made, warnings = _known(kind, body, validation)
    if is_status:
        made = {**before, "status": made.get("status", {})}
    else:
        made = _composed(kind, made, before)
    made = _checked(kind, made, before)
    added = set(made["metadata"].get("finalizers", ())) - set(old.get("finalizers", ()))
    if "deletionTimestamp" in old and added:
        why = "no new finalizers can be added if the object is being deleted"
        raise invalid(kind.resource, made, [Finding(("metadata", "finalizers"), why)])
    if made == before:
        return before, warnings
    if "generation" in old and _desired(made) != _desired(before):
        made["metadata"]["generation"] = old["generation"] + 1
    return made, warnings


def _composed(kind: Kind, sent: Object, there: Object) -> Object:
    """Return what the client sent, with the fields that only the server and the status may set."""
    said = {k: v for k, v in sent["metadata"].items() if v and k not in _SERVERS_OWN}
    own = {key: there["metadata"][key] for key in _SERVERS_OWN if key in there["metadata"]}
    made = {**sent, "metadata": {**said, **own}}
    if kind.has_status:
        made.pop("status", None)
        made |= {"status": there["status"]} if "status" in there else {}
    return made


def check_preconditions(resource: Resource, made: Object, wanted: Object) -> None:
    """Check that a change or a deletion was meant for this object, in its present state.

    Raises:
        StatusError: 409.
    """
    metadata = made["metadata"]
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


def _known(kind: Kind, body: Object, validation: str) -> Admitted:
    """Return a copy of the object without unknown fields."""
    resource = kind.resource
    typed = {"apiVersion": resource.api_version, "kind": resource.kind}
    for key, value in typed.items():
        if body.get(key, value) != value:
            raise bad_request(f"the {key} in the data ({body[key]}) is not the expected {value}")
    made = with_defaults({**typed, **body}, kind.schema)
    findings = check_structure(made, kind.schema)
    for one in findings:
        is_metadata = one.path[:1] == ("metadata",) and not one.is_unknown
        # The server replaces its own fields unread, and may generate the name.
        if is_metadata and (one.path != _NAME or "name" in made["metadata"]):
            raise unreadable(resource, f"{show_path(one.path)} {one.message}")
    if wrong := check_metadata(made["metadata"]):
        raise invalid(resource, made, wrong)
    unknown = [one.path for one in findings if one.is_unknown]
    said = [f'unknown field "{show_path(path)}"' for path in unknown]
    if said and validation == "Strict":
        raise unreadable(resource, f"strict decoding error: {', '.join(said)}")
    for path in unknown:
        parent: Any = made
        for part in path[:-1]:
            parent = parent[part]
        del parent[path[-1]]
    return made, said if validation == "Warn" else []


def _checked(kind: Kind, made: Object, before: Object | None = None) -> Object:
    """Return the object with its defaults.

    Raises:
        StatusError: it breaks its schema or its rules.
    """
    made = with_defaults(made, kind.schema)
    findings = check_structure(made, kind.schema)
    if findings and not kind.is_custom:
        why = f"{show_path(findings[0].path)} {findings[0].message}"
        raise unreadable(kind.resource, why)
    findings += _wrong_name(kind, str(made["metadata"]["name"]))
    old = {} if before is None else {"old": before}
    findings += check_rules(made, kind.schema, findings, **old)
    if findings:
        raise invalid(kind.resource, made, findings)
    return accepted(made) if kind.resource == CRDS else made


def _wrong_name(kind: Kind, name: str) -> list[Finding]:
    is_namespace = kind.resource == NAMESPACES
    if is_dns_label(name) if is_namespace else is_subdomain(name):
        return []
    form, example = ("label", "example") if is_namespace else ("subdomain", "example.com")
    why = f"a lowercase RFC 1123 {form} is needed, such as {example}"
    return [Finding(_NAME, why)]


def _desired(made: Object) -> Object:
    return {key: value for key, value in made.items() if key not in ("metadata", "status")}

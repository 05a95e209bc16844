"""What becomes of an object between the request and the store: metadata, defaults, checks.

The rules are those of `ftctl validate`: a CRD's defaults, its structure, its CEL. Pure functions.
"""

import re
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune_operator.api.cel import check_rules
from finetune_operator.api.defaults import with_defaults
from finetune_operator.api.paths import FieldPath, Finding, show_path
from finetune_operator.api.structural import check_structure
from finetune_operator.embedded.kinds import Kind, accepted
from finetune_operator.embedded.refusals import bad_request, conflict, invalid, unreadable
from finetune_operator.embedded.store import CRDS, timestamp
from finetune_operator.kube.resources import NAMESPACES, Object, Resource

_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_NO_SUBDOMAIN = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used "
    f"for validation is '{_SUBDOMAIN}')"
)
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, so no words
_KEPT = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")


@dataclass(frozen=True)
class Admitted:
    """An object as it is to be stored.

    Attributes:
        warnings: Sentences for the client.
    """

    made: Object
    warnings: Sequence[str] = ()


def admit_new(
    kind: Kind, body: Object, namespace: str, validation: str, name: str | None = None
) -> Admitted:
    """Return the object to create.

    Args:
        kind: Its kind.
        body: What was sent.
        namespace: Where it was sent to; empty for kinds that live in no namespace.
        validation: `Strict`, `Warn` or `Ignore` unknown fields.
        name: Its name where the URL says it.

    Raises:
        RefusalError: 400 or 422.
    """
    body = _typed(kind, body)
    metadata: Object = {"name": name} if name else {}
    metadata |= {key: value for key, value in body["metadata"].items() if value}
    if metadata.get("namespace", namespace) != namespace:
        raise bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    if not metadata.get("name") and metadata.get("generateName"):
        suffix = "".join(secrets.choice(_SUFFIX) for _ in range(5))
        metadata["name"] = f"{metadata['generateName']}{suffix}"
    for key in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds"):
        metadata.pop(key, None)
    metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
    if namespace:
        metadata["namespace"] = namespace
    if kind.has_status or kind.is_custom:
        metadata["generation"] = 1
    made = {**body, "metadata": metadata}
    if not metadata.get("name"):
        missing = "Required value: name or generateName is required"
        raise invalid(kind.resource, made, [Finding(("metadata", "name"), missing)])
    made, warnings = _known(kind, made, validation)
    if kind.has_status:
        made.pop("status", None)
    made = _checked(kind, made)
    if kind.resource == NAMESPACES:
        named = {"kubernetes.io/metadata.name": made["metadata"]["name"]}
        made["metadata"]["labels"] = {**made["metadata"].get("labels", {}), **named}
        made["status"] = {"phase": "Active"}
    return Admitted(accepted(made) if str(kind.resource) == CRDS else made, warnings)


def admit_change(
    kind: Kind, body: Object, before: Object, validation: str, subresource: str | None = None
) -> Admitted:
    """Return the object to store in place of `before`, or `before` itself where nothing changes.

    Raises:
        RefusalError: 400, 409 or 422.
    """
    body = _typed(kind, body)
    _check_preconditions(kind, body, before)
    made, warnings = _known(kind, body, validation)
    old = before["metadata"]
    if subresource == "status":
        made = {**before, "status": made.get("status", {})}
    else:
        metadata = dict(made["metadata"])
        metadata |= {key: old[key] for key in (*_KEPT, "namespace", "generation") if key in old}
        metadata["name"] = old["name"]
        made["metadata"] = {
            key: value for key, value in metadata.items() if value not in (None, [], {})
        }
        if kind.has_status:
            made.pop("status", None)
            made |= {"status": before["status"]} if "status" in before else {}
    made["metadata"] = {**made["metadata"], "resourceVersion": old["resourceVersion"]}
    made = _checked(kind, made, before)
    added = set(made["metadata"].get("finalizers", ())) - set(old.get("finalizers", ()))
    if "deletionTimestamp" in old and added:
        why = "no new finalizers can be added if the object is being deleted"
        raise invalid(kind.resource, made, [Finding(("metadata", "finalizers"), why)])
    if str(kind.resource) == CRDS:
        made = accepted(made)
    if made == before:
        return Admitted(before, warnings)
    if "generation" in old and _desired(made) != _desired(before):
        made["metadata"]["generation"] = old["generation"] + 1
    return Admitted(made, warnings)


def _typed(kind: Kind, body: Object) -> Object:
    resource = kind.resource
    sent = body.get("apiVersion", resource.api_version)
    if sent != resource.api_version:
        raise bad_request(
            f"the API version in the data ({sent}) does not match the expected API version "
            f"({resource.api_version})"
        )
    if body.get("kind", resource.kind) != resource.kind:
        wrong = Finding(("kind",), f"must be {resource.kind}")
        raise invalid(resource, body, [wrong])
    return {"apiVersion": resource.api_version, "kind": resource.kind, **body}


def _known(kind: Kind, body: Object, validation: str) -> tuple[Object, list[str]]:
    """Return the object without unknown fields, with the schema's defaults, and the warnings."""
    made = with_defaults(body, kind.schema)
    unknown = [one.path for one in check_structure(made, kind.schema) if one.is_unknown]
    said = [f'unknown field "{show_path(path)}"' for path in unknown]
    if said and validation == "Strict":
        raise unreadable(kind.resource, f"strict decoding error: {', '.join(said)}")
    for path in unknown:
        _prune(made, path)
    return made, said if validation == "Warn" else []


def _prune(value: Any, path: FieldPath) -> None:
    for part in path[:-1]:
        value = value[part]
    value.pop(path[-1], None)


def _checked(kind: Kind, made: Object, before: Object | None = None) -> Object:
    """Return the object with its defaults.

    Raises:
        RefusalError: it breaks its schema or its rules.
    """
    made = with_defaults(made, kind.schema)
    findings = check_structure(made, kind.schema)
    if findings and not kind.is_custom:
        why = f"{show_path(findings[0].path)} {findings[0].message}"
        raise unreadable(kind.resource, why)
    name = str(made["metadata"]["name"])
    if not re.fullmatch(_SUBDOMAIN, name) and not kind.resource.group.startswith("rbac."):
        findings.append(Finding(("metadata", "name"), _NO_SUBDOMAIN))
    if before is None:
        findings += check_rules(made, kind.schema, findings)
    else:
        findings += check_rules(made, kind.schema, findings, before)
    if findings:
        raise invalid(kind.resource, made, findings)
    checked: Object = made
    return checked


def _check_preconditions(kind: Kind, body: Object, before: Object) -> None:
    resource, old = kind.resource, before["metadata"]
    metadata = body["metadata"]
    if metadata.get("name", old["name"]) != old["name"]:
        raise bad_request(
            f"the name of the object ({metadata['name']}) does not match the name on the URL "
            f"({old['name']})"
        )
    if metadata.get("resourceVersion") not in (None, "", old["resourceVersion"]):
        raise conflict(resource, old["name"])
    if metadata.get("uid") not in (None, "", old["uid"]):
        why = (
            f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: "
            f"{old['uid']}"
        )
        raise conflict(resource, old["name"], why)


def check_delete(resource: Resource, made: Object, preconditions: Object) -> None:
    """Refuse a deletion whose preconditions do not hold.

    Raises:
        RefusalError: 409.
    """
    metadata = made["metadata"]
    for key, word, doubt in (
        ("uid", "UID", "deleted and then recreated"),
        ("resourceVersion", "ResourceVersion", "modified"),
    ):
        wanted = preconditions.get(key)
        if wanted is not None and wanted != metadata[key]:
            why = (
                f"the {word} in the precondition ({wanted}) does not match the {word} in record "
                f"({metadata[key]}). The object might have been {doubt}"
            )
            raise conflict(resource, metadata["name"], why)


def _desired(made: Object) -> Object:
    return {key: value for key, value in made.items() if key not in ("metadata", "status")}

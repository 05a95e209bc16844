"""Schema and checks of Kubernetes object metadata.

A CRD must not describe metadata, because the API server checks it. `validation.py`, the embedded
API and the checks of a backend refuse the same metadata before a request is sent.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from finetune_operator.api.openapi import Schema
from finetune_operator.api.paths import FieldPath, Finding, show_value

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_DNS_LABEL.pattern}(\.{_DNS_LABEL.pattern})*")
_WORD = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_LONGEST_WORD = 63
_LONGEST_NAME = 253
_LONGEST_ANNOTATIONS = 256 * 1024  # bytes, of keys and values together

_WORDS = (
    "at most 63 letters, digits, hyphens, underscores and dots, with a letter or digit at both ends"
)

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_ANY: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _texts_named(names: str) -> dict[str, Schema]:
    return dict.fromkeys(names.split(), _TEXT)


def _objects(properties: dict[str, Schema]) -> Schema:
    return {"type": "array", "items": {"type": "object", "properties": properties}}


_OWNER = {
    **_texts_named("apiVersion kind name uid"),
    "controller": _FLAG,
    "blockOwnerDeletion": _FLAG,
}
_MANAGER = {
    **_texts_named("manager operation apiVersion time fieldsType subresource"),
    "fieldsV1": _ANY,
}
OBJECT_METADATA: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {**_TEXT, "description": "Name of the job.", "maxLength": _LONGEST_NAME},
        **_texts_named("generateName namespace uid resourceVersion selfLink"),
        **_texts_named("creationTimestamp deletionTimestamp"),
        "labels": _TEXTS,
        "annotations": _TEXTS,
        "finalizers": {"type": "array", "items": _TEXT},
        "ownerReferences": _objects(_OWNER),
        "managedFields": _objects(_MANAGER),
        "generation": _COUNT,
        "deletionGracePeriodSeconds": _COUNT,
    },
}


def check_metadata(metadata: Any) -> list[Finding]:
    """Return the errors of the API server for the metadata of any object, except structural ones.

    Values of a wrong type are reported by `check_structure`, and names are checked by
    `is_subdomain` and the rules of the kind.
    """
    return [] if not isinstance(metadata, dict) else list(_check(metadata))


def is_subdomain(name: str) -> bool:
    """Whether most kinds allow this name: `example.com`, at most 253 characters."""
    return len(name) <= _LONGEST_NAME and _SUBDOMAIN.fullmatch(name) is not None


def is_dns_label(name: str) -> bool:
    """Whether this is a DNS label, as namespace names are: `example`, at most 63 characters."""
    return len(name) <= _LONGEST_WORD and _DNS_LABEL.fullmatch(name) is not None


def wrong_key(key: str) -> str:
    """Return an error about the key of a label or annotation; empty if the key is valid."""
    prefix, slash, name = key.rpartition("/")
    if slash and not is_subdomain(prefix):
        return (
            f"cannot be a key, because {show_value(prefix)} before the / is not a DNS name; use a "
            "name such as example.com in lower case, without another /"
        )
    if not _is_word(name):
        after = " after the /" if slash else ", optionally after a DNS name and a /"
        return f"cannot be a key; use {_WORDS}{after}"
    return ""


def wrong_label_value(value: str) -> str:
    """Return an error about the value of a label; empty if the value is valid."""
    if not value or _is_word(value):
        return ""
    return f"{show_value(value)} cannot be the value of a label; use {_WORDS}"


def _is_word(text: str) -> bool:
    return len(text) <= _LONGEST_WORD and _WORD.fullmatch(text) is not None


def _check(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    start = metadata.get("generateName")
    if isinstance(start, str) and start and not is_subdomain(_without_dash(start)):
        text = "cannot begin a name; use lower-case letters, digits, hyphens and dots"
        yield Finding(("metadata", "generateName"), f"{show_value(start)} {text}")
    namespace = metadata.get("namespace")
    if isinstance(namespace, str) and not is_dns_label(namespace):
        text = (
            "cannot be the name of a namespace; use at most 63 lower-case letters, digits and "
            "hyphens, with a letter or digit at both ends"
        )
        yield Finding(("metadata", "namespace"), f"{show_value(namespace)} {text}")
    for key, value in _texts(metadata, "labels"):
        path: FieldPath = ("metadata", "labels", key)
        if wrong := wrong_key(key):
            yield Finding(path, wrong)
        if wrong := wrong_label_value(value):
            yield Finding(path, wrong)
    yield from _annotations(metadata)
    yield from _finalizers(metadata.get("finalizers"))
    yield from _owners(metadata.get("ownerReferences"))
    for field in ("creationTimestamp", "deletionTimestamp"):
        time = metadata.get(field)
        if isinstance(time, str) and not _is_time(time):
            text = "is not a time; write it as 2006-01-02T15:04:05Z, or remove it"
            yield Finding(("metadata", field), f"{show_value(time)} {text}")


def _annotations(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    size = 0
    for key, value in _texts(metadata, "annotations"):
        size += len(key.encode()) + len(value.encode())
        # The API server compares keys of annotations in lower case, but not keys of labels.
        if wrong := wrong_key(key.lower()):
            yield Finding(("metadata", "annotations", key), wrong)
    if size > _LONGEST_ANNOTATIONS:
        text = (
            f"have {size:,} bytes including keys, but at most {_LONGEST_ANNOTATIONS:,} fit; store "
            "large texts elsewhere"
        )
        yield Finding(("metadata", "annotations"), text)


def _finalizers(given: Any) -> Iterator[Finding]:
    names = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
    for index, name in enumerate(names):
        if wrong := wrong_key(name):
            text = wrong.replace("be a key", "be a finalizer")
            yield Finding(("metadata", "finalizers", index), f"{show_value(name)} {text}")
    if {"orphan", "foregroundDeletion"} <= set(names):
        text = "contains orphan and foregroundDeletion, which are mutually exclusive; remove one"
        yield Finding(("metadata", "finalizers"), text)


def _owners(given: Any) -> Iterator[Finding]:
    owners = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    for index, owner in enumerate(owners):
        path: FieldPath = ("metadata", "ownerReferences", index)
        version = str(owner.get("apiVersion") or "")
        if version.count("/") > 1 or not version.rpartition("/")[2]:
            text = "must name a version, such as v1 or batch/v1"
            yield Finding((*path, "apiVersion"), f"{show_value(version)} {text}")
        for field in ("kind", "name", "uid"):
            if not owner.get(field):
                yield Finding((*path, field), "is missing or empty; set it")
        if (version, owner.get("kind")) == ("v1", "Event"):
            yield Finding(path, "names an Event, which cannot own anything; remove it")
    controllers = {str(one.get("uid")) for one in owners if one.get("controller") is True}
    if len(controllers) > 1:
        text = "has several owners with controller: true, but can have only one; remove some"
        yield Finding(("metadata", "ownerReferences"), text)


def _texts(metadata: Mapping[str, Any], field: str) -> list[tuple[str, str]]:
    given = metadata.get(field)
    pairs = given.items() if isinstance(given, dict) else ()
    return [(key, value) for key, value in pairs if isinstance(value, str)]


def _without_dash(start: str) -> str:
    """Replace a trailing hyphen, which is allowed because a generated suffix follows it."""
    return f"{start[:-2]}a" if len(start) > 1 and start.endswith("-") else start


def _is_time(text: str) -> bool:
    if not _TIME.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True

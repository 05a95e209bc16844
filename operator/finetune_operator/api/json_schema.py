"""Convert the schemas of both kinds into JSON schemas (draft 7), for editors and other tools.

`ftctl crd --format jsonschema` and `docs/reference/generate.py` call it. A JSON schema contains
structure, defaults and descriptions; only `ftctl validate` and the API server check the rules.
"""

import re
from typing import Any

from finetune_operator.api.crd import job_schema, profile_schema
from finetune_operator.api.metadata import OBJECT_METADATA
from finetune_operator.api.openapi import Schema, is_refused
from finetune_operator.api.schema import ABOVE_ZERO
from finetune_operator.api.v1alpha1 import GROUP, KIND, PROFILE_KIND, VERSION

DRAFT = "http://json-schema.org/draft-07/schema#"
_COPIED = (
    *("type", "description", "default", "enum", "pattern", "minimum", "maximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
)


def json_schemas() -> dict[str, Schema]:
    """Return the JSON schema of each kind, by the name of its file."""
    return {
        "finetunejob.json": {"$schema": DRAFT, **_of_kind(KIND, job_schema())},
        "finetuneprofile.json": {"$schema": DRAFT, **_of_kind(PROFILE_KIND, profile_schema())},
    }


def schema_of_both() -> Schema:
    """Return one JSON schema for both kinds, for files that contain either."""
    kinds = {KIND: job_schema(), PROFILE_KIND: profile_schema()}
    choices = [
        {"if": {"properties": {"kind": {"const": kind}}}, "then": _of_kind(kind, schema)}
        for kind, schema in kinds.items()
    ]
    kind = {"kind": {"type": "string", "enum": list(kinds)}}
    return {
        "$schema": DRAFT,
        "type": "object",
        "required": ["kind"],
        "properties": kind,
        "allOf": choices,
    }


def words_of(schema: Schema) -> list[str]:
    """Return the words that a field accepts besides integers; empty for any text."""
    rules = schema.get("x-kubernetes-validations", ())
    return [word for rule in rules for word in re.findall(r"self == '(\w+)'", rule["rule"])]


def is_above_zero(schema: Schema) -> bool:
    """Whether a rule excludes 0, which no bound of a structural schema can."""
    rules = schema.get("x-kubernetes-validations", ())
    return any(rule["rule"] == ABOVE_ZERO.expression for rule in rules)


def _of_kind(kind: str, schema: Schema) -> Schema:
    properties = {
        **schema["properties"],
        "apiVersion": {"type": "string", "enum": [f"{GROUP}/{VERSION}"]},
        "kind": {"type": "string", "enum": [kind]},
        "metadata": OBJECT_METADATA,
    }
    required = ["apiVersion", "kind", "metadata", "spec"]
    return {"title": kind, **_plain({**schema, "properties": properties, "required": required})}


def _plain(schema: Schema) -> Schema:
    """Return a schema without keywords of Kubernetes and without fields that a rule refuses."""
    plain: dict[str, Any] = {key: part for key, part in schema.items() if key in _COPIED}
    if is_above_zero(schema):
        plain["exclusiveMinimum"] = plain.pop("minimum", 0)
    if "x-kubernetes-int-or-string" in schema:
        plain |= _integer_or_word(schema, plain)
    if "items" in schema:
        plain["items"] = _plain(schema["items"])
    if "properties" in schema:
        offered = {
            name: _plain(part)
            for name, part in schema["properties"].items()
            if not is_refused(part)
        }
        plain |= {"properties": offered, "additionalProperties": False}
        if "required" in schema:
            plain["required"] = schema["required"]
    elif isinstance(schema.get("additionalProperties"), dict):
        plain["additionalProperties"] = _plain(schema["additionalProperties"])
    return plain


def _integer_or_word(schema: Schema, plain: Schema) -> Schema:
    """Return the choice between an integer and a word, whose bounds move into it."""
    number = {key: plain.pop(key) for key in ("minimum", "maximum") if key in plain}
    length = {key: plain.pop(key) for key in ("maxLength",) if key in plain}
    words = words_of(schema)
    text = {"type": "string", **({"enum": words} if words else length)}
    return {"anyOf": [{"type": "integer", **number}, text]}

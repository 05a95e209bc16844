"""Check an object against a structural schema, with a message for each kind of error.

`validation.py` calls it after filling in defaults. Like the API server with `fieldValidation:
Strict`, it refuses unknown fields, wrong types, and values outside of the bounds of the schema.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from finetune_operator.api.openapi import Schema, is_refused
from finetune_operator.api.other_tools import explanation, replacement
from finetune_operator.api.other_tools_table import Entry
from finetune_operator.api.paths import FieldPath, Finding, show_path, show_value

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_UNIT_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_TYPES = {
    "integer": int,  # not 8.0, which the rules of the API server refuse
    "number": int | float,
    "string": str,
    "array": list,
    "object": dict,
}
_TYPE_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "array": "a list",
    "object": "a mapping of fields",
}


Owners = dict[str, str]  # path of every field by its name, for "did you mean"
EntryOf = Callable[[FieldPath], Entry | None]


@dataclass(frozen=True)
class _Names:
    """Names that explain an unknown field: fields of the schema, and keys of other tools."""

    owners: Owners
    entry_of: EntryOf


def check_structure(
    value: Any, schema: Schema, path: FieldPath = (), *, entry_of: EntryOf = lambda _: None
) -> list[Finding]:
    """Return all errors of `value` against `schema`, in the order of the value.

    Args:
        value: The value.
        schema: Its schema.
        path: Path of the value.
        entry_of: Return the explanation of a field that the schema does not have, by its path.
    """
    return list(_check(value, schema, path, _Names(_owners(schema), entry_of)))


def _check(value: Any, schema: Schema, path: FieldPath, names: _Names) -> Iterator[Finding]:
    if is_refused(schema):
        return  # its rule reports the field
    wrong = _wrong_type(value, schema, path, names)
    if wrong is not None:
        yield wrong
    elif isinstance(value, dict):
        yield from _check_object(value, schema, path, names)
    elif isinstance(value, list):
        yield from _check_list(value, schema, path, names)
    elif isinstance(value, str):
        yield from _check_text(value, schema, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _check_number(value, schema, path)


def _wrong_type(value: Any, schema: Schema, path: FieldPath, names: _Names) -> Finding | None:
    if "x-kubernetes-int-or-string" in schema:
        if isinstance(value, int | str) and not isinstance(value, bool):
            return None
        return Finding(path, f"{show_value(value)} must be a whole number or a word")
    expected = schema.get("type")
    if expected is None or _has_type(value, expected):
        return None
    message = f"{show_value(value)} must be {_TYPE_WORDS[expected]}"
    if expected == "object" and (entry := names.entry_of(path)) and entry.fields:
        return Finding(path, f"{message}; {replacement(entry)}")
    return Finding(path, message + _type_hint(value, expected, path))


def _has_type(value: Any, expected: str) -> bool:
    if isinstance(value, bool):
        return expected == "boolean"
    return expected != "boolean" and isinstance(value, _TYPES[expected])


def _type_hint(value: Any, expected: str, path: FieldPath) -> str:
    """Return a correction if a common mistake explains the value."""
    if expected == "string" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if expected not in ("integer", "number") or not isinstance(value, str):
        return ""
    quantity = _QUANTITY.fullmatch(value)
    if quantity and str(path[-1]).endswith(("Seconds", "meanTimeBetweenFailures")):
        number, unit = quantity.groups()
        if unit in _UNIT_SECONDS:
            return f" of seconds without a unit; write {float(number) * _UNIT_SECONDS[unit]:g}"
        return " of seconds without a unit"
    if quantity:
        return " without a unit"
    try:
        float(value)
    except ValueError:
        return ""
    return "; write it without quotes"


def _check_object(
    value: dict[str, Any], schema: Schema, path: FieldPath, names: _Names
) -> Iterator[Finding]:
    properties: dict[str, Schema] = schema.get("properties", {})
    for key in schema.get("required", []):
        if key not in value:
            meaning = properties[key].get("description", "")
            hint = f" ({meaning.rstrip('.')})" if meaning else ""
            yield Finding((*path, key), f"is missing; set it{hint}")
    if len(value) > schema.get("maxProperties", len(value)):
        yield Finding(path, f"has {len(value)} entries; at most {schema['maxProperties']} fit")
    for key, item in value.items():
        inner = properties.get(key, schema.get("additionalProperties"))
        if isinstance(inner, dict):
            yield from _check(item, inner, (*path, key), names)
        elif "x-kubernetes-preserve-unknown-fields" not in schema:
            offered = {name: part for name, part in properties.items() if not is_refused(part)}
            yield from _unknown(item, offered, (*path, key), names)


def _unknown(
    value: Any, properties: dict[str, Schema], path: FieldPath, names: _Names
) -> Iterator[Finding]:
    key = str(path[-1])
    if entry := names.entry_of(path):
        message = explanation(entry)
    elif guess := _guess(key, properties, names.owners):
        yield Finding(path, guess, is_unknown=True)
        return
    elif len(properties) > 12:
        message = "is not a known field; remove it"
    else:
        message = f"is not a known field; remove it, or use one of {', '.join(properties)}"
    yield Finding(path, message, is_unknown=True)
    yield from _explained_below(value, path, names)


def _explained_below(value: Any, path: FieldPath, names: _Names) -> Iterator[Finding]:
    """Yield the keys of other tools within an unknown field."""
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        if isinstance(key, str) and (entry := names.entry_of((*path, key))):
            yield Finding((*path, key), explanation(entry), is_unknown=True)
        yield from _explained_below(item, (*path, key), names)


def _guess(key: str, properties: dict[str, Schema], owners: Owners) -> str | None:
    for known in get_close_matches(key, properties, n=1, cutoff=0.7):
        return f"is not a known field; did you mean {known}?"
    if key in owners:
        return f"is not a known field here; did you mean {owners[key]}?"
    for known in get_close_matches(key, owners, n=1, cutoff=0.8):
        return f"is not a known field; did you mean {owners[known]}?"
    return None


def _owners(schema: Schema, path: FieldPath = ()) -> Owners:
    """Return the path of every field name below `schema`; the outermost path of several."""
    properties = {
        key: inner
        for key, inner in schema.get("properties", {}).items()
        if (*path, key) != ("status",)  # not written by users
        and not is_refused(inner)
    }
    found = {key: show_path((*path, key)) for key in properties}
    for key, inner in properties.items():
        found = _owners(inner, (*path, key)) | found
    return found


def _check_list(
    value: list[Any], schema: Schema, path: FieldPath, names: _Names
) -> Iterator[Finding]:
    if len(value) > schema.get("maxItems", len(value)):
        yield Finding(path, f"has {len(value)} entries; at most {schema['maxItems']} fit")
    if len(value) < schema.get("minItems", 0):
        text = f"has {len(value)} entries; give at least {schema['minItems']}, or remove it"
        yield Finding(path, text)
    for index, item in enumerate(value):
        yield from _check(item, schema["items"], (*path, index), names)


def _check_text(value: str, schema: Schema, path: FieldPath) -> Iterator[Finding]:
    shown = show_value(value)
    if "enum" in schema and value not in schema["enum"]:
        yield Finding(path, f"{shown} is not one of {', '.join(schema['enum'])}")
    if len(value) < schema.get("minLength", 0):
        least = schema["minLength"]
        message = "must not be empty" if least == 1 else f"must have at least {least} characters"
        yield Finding(path, f"{shown} {message}")
    if len(value) > schema.get("maxLength", len(value)):
        most = schema["maxLength"]
        yield Finding(path, f"{shown} has {len(value)} characters; at most {most} fit")
    pattern = schema.get("pattern")
    if pattern and not matches(pattern, value):
        yield Finding(path, f"{shown} does not match {pattern}")


def matches(pattern: str, text: str) -> bool:
    """Search like Go, where `$` matches the end of the text but not before a final newline."""
    exact = pattern[:-1] + r"\Z" if pattern.endswith("$") else pattern
    return re.search(exact, text) is not None


def _check_number(value: int | float, schema: Schema, path: FieldPath) -> Iterator[Finding]:
    if value < schema.get("minimum", value):
        yield Finding(path, f"{show_value(value)} must be at least {schema['minimum']}")
    if value > schema.get("maximum", value):
        yield Finding(path, f"{show_value(value)} must be at most {schema['maximum']}")

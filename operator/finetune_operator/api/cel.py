"""Evaluate the CEL rules of a schema at every node of an object, like the API server.

Rules get the object with its defaults, and a rule that raises an error counts as broken. Rules that
name `oldSelf` are evaluated only on an update.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from cel import Context, Program
from cel import compile as compile_cel

from finetune_operator.api.openapi import DETAIL, Schema
from finetune_operator.api.paths import FieldPath, Finding, is_scalar, show_value

_REFERENCE = re.compile(r"\bself((?:\.[A-Za-z_]\w*\b(?!\())*)")  # fields, not functions
_ABSENT = object()


def check_rules(
    value: Any, schema: Schema, findings: Sequence[Finding] = (), old: Any = _ABSENT
) -> list[Finding]:
    """Return a finding for each rule that does not hold.

    Args:
        value: The object with its defaults.
        schema: Its structural schema.
        findings: Structural errors. A rule that reads such a field is not evaluated, because it
            would only repeat the finding.
        old: The object before an update, with its defaults. A rule without `oldSelf` is not
            evaluated in an unchanged part, so that objects stored before the rule was added can be
            changed.
    """
    blocked = tuple(finding.path for finding in findings if not finding.is_unknown)
    return list(_check(value, old, schema, (), blocked))


def _check(
    value: Any,
    old: Any,
    schema: Schema,
    path: FieldPath,
    blocked: Sequence[FieldPath],
    is_unchanged: bool = False,
) -> Iterator[Finding]:
    is_unchanged = is_unchanged or (old is not _ABSENT and old == value)
    for validation in schema.get("x-kubernetes-validations", []):
        is_due = not is_unchanged or "oldSelf" in validation["rule"]
        if is_due and not _is_blocked(validation["rule"], path, blocked):
            yield from _check_one(value, old, schema, path, validation)
    if isinstance(value, dict):
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if isinstance(inner, dict):
                before = old.get(key, _ABSENT) if isinstance(old, dict) else _ABSENT
                yield from _check(item, before, inner, (*path, key), blocked, is_unchanged)
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            part = (*path, index)
            yield from _check(item, _ABSENT, schema["items"], part, blocked, is_unchanged)


def _is_blocked(rule: str, path: FieldPath, blocked: Sequence[FieldPath]) -> bool:
    """Whether a wrong value is at, above or below a field that the rule reads."""
    for reference in _REFERENCE.findall(rule):
        read = (*path, *reference.split(".")[1:])
        for wrong in blocked:
            shared = min(len(read), len(wrong))
            if read[:shared] == wrong[:shared]:
                return True
    return False


def _check_one(
    value: Any, old: Any, schema: Schema, path: FieldPath, validation: dict[str, str]
) -> Iterator[Finding]:
    program = _compiled(validation["rule"])
    context = Context({"self": _to_cel(value, schema)})
    context.add_function("split", str.split)  # of the API server's string functions the only one
    if "oldSelf" in program.variables():
        if old is _ABSENT:
            return
        context.add_variable("oldSelf", _to_cel(old, schema))
    message, detail = validation["message"], ""
    try:
        if program.execute(context) is True:
            return
        if "messageExpression" in validation:
            message = _compiled(validation["messageExpression"]).execute(context)
        if DETAIL in validation:
            detail = f" {_compiled(validation[DETAIL]).execute(context)}"
    except Exception as error:  # the library raises many types; the API server refuses on any
        detail = f" (its rule cannot be evaluated: {error})"
    field = tuple(validation["fieldPath"].split(".")[1:]) if "fieldPath" in validation else ()
    yield Finding((*path, *field), f"{_quoted(value, field)}{message}{detail}")


@cache
def _compiled(rule: str) -> Program:
    return compile_cel(rule)


def _quoted(value: Any, field: tuple[str, ...]) -> str:
    """Return the value of the field and a space; empty if the value has no short form."""
    for part in field:
        value = value.get(part) if isinstance(value, dict) else None
    return f"{show_value(value)} " if is_scalar(value) else ""


def _to_cel(value: Any, schema: Schema) -> Any:
    """Convert a value to the types that the schema declares, without undeclared fields."""
    if schema.get("type") == "number" and isinstance(value, int):
        return float(value)
    if isinstance(value, list) and "items" in schema:
        return [_to_cel(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or "x-kubernetes-preserve-unknown-fields" in schema:
        return value
    properties = schema.get("properties", {})
    other = schema.get("additionalProperties")
    return {
        key: _to_cel(item, properties.get(key, other))
        for key, item in value.items()
        if key in properties or isinstance(other, dict)
    }

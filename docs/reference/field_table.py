"""Describe the fields of a structural schema as rows of a Markdown table; `kind_pages` calls it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from finetune_operator.api.json_schema import is_above_zero, words_of
from finetune_operator.api.openapi import INT32_MAX, Schema, is_refused
from finetune_operator.api.schema import ABOVE_ZERO

OF_KUBERNETES = "as in a PodSpec."
"""End of the descriptions of fields of Kubernetes."""


class UndescribedFieldError(ValueError):
    """A field has no description."""


@dataclass(frozen=True)
class Field:
    """A field of a block.

    Attributes:
        path: Its path within the block; `[]` is any entry of a list, `{}` any value of a map.
        schema: Its schema.
        is_required: Whether its object must contain it.
    """

    path: str
    schema: Schema
    is_required: bool

    @property
    def is_of_kubernetes(self) -> bool:
        """Whether all fields below it are fields of Kubernetes that a job may set."""
        below = list(_below(self.schema))
        return bool(below) and all(
            one.get("description", "").endswith(OF_KUBERNETES) and not is_refused(one)
            for one in below
        )

    @property
    def names(self) -> list[str]:
        """Names of the fields directly below it, also of the entries of a list."""
        return list(self.schema.get("items", self.schema).get("properties", {}))


def direct_fields(schema: Schema, path: str = "") -> Iterator[Field]:
    """Yield the fields directly below a schema, without those that a rule refuses."""
    for name, part in schema.get("properties", {}).items():
        if not is_refused(part):
            yield Field(f"{path}{name}", part, name in schema.get("required", ()))


def fields_below(schema: Schema, path: str = "") -> Iterator[Field]:
    """Yield all fields below a field, each before the fields below it.

    An object of Kubernetes with all its fields is yielded without the fields below it.
    """
    for field in direct_fields(schema, f"{path}." if path else ""):
        yield field
        if not field.is_of_kubernetes:
            yield from fields_below(field.schema, field.path)
    for suffix, part in _parts(schema):
        yield from fields_below(part, f"{path}{suffix}")


def table(
    fields: Iterable[Field], root: str, notes: Mapping[str, str], blocks: Iterable[str] = ()
) -> str:
    """Return the table of fields.

    Args:
        fields: The fields.
        root: Path of their block, such as `spec.model`.
        notes: Text to append to a description, by the whole path of the field.
        blocks: Fields that have a section of their own on the page.

    Raises:
        UndescribedFieldError: a field has no description.
    """
    rows = [["Field", "Type", "Default", "Description"], ["---"] * 4]
    rows += [_cells(one, root, notes, blocks) for one in fields]
    if root.startswith("status"):  # written by the operator, so that no default matters
        rows = [[*row[:2], *row[3:]] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(field: Field, root: str, notes: Mapping[str, str], blocks: Iterable[str]) -> list[str]:
    whole = f"{root}.{field.path}"
    described = field.schema.get("description")
    if not described:
        raise UndescribedFieldError(f"{whole} has no description; write a docstring below it")
    name = f"`{field.path}`"
    if field.path in blocks:
        name = f"[{name}](#{root}{field.path.lower()})"
    texts = [escaped(described), _pattern(field.schema), notes.get(whole, "")]
    if field.is_of_kubernetes:
        texts.append(f"Fields: {', '.join(f'`{one}`' for one in field.names)}.")
    default = "required" if field.is_required else _default(field.schema)
    return [name, type_of(field.schema), default, " ".join(filter(None, texts))]


def type_of(schema: Schema) -> str:
    """Return the type of a field with its limits."""
    if "x-kubernetes-int-or-string" in schema:
        words = " or ".join(f"`{word}`" for word in words_of(schema)) or "string"
        return f"integer{_range(schema)}, or {words}"
    if "enum" in schema:
        return "enum: " + ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        return f"list of {_part_type(schema['items'])}{_length(schema, 'Items', 'entries')}"
    if kind == "object":
        if isinstance(schema.get("additionalProperties"), dict):
            inner = _part_type(schema["additionalProperties"])
            return f"map to {inner}{_length(schema, 'Properties', 'entries')}"
        return "object"
    if kind == "string":
        return f"string{_length(schema, 'Length', 'characters')}"
    return f"{kind}{_range(schema)}"


def _part_type(schema: Schema) -> str:
    """Return the type of each entry, with its limits in parentheses."""
    name, comma, limits = type_of(schema).partition(", ")
    return f"{name} ({limits})" if comma else name


def refused_fields(schema: Schema, path: str) -> list[str]:
    """Return a sentence for each object below a schema in which fields are refused."""
    found = [name for name, part in schema.get("properties", {}).items() if is_refused(part)]
    sentences = [f"`{path}` refuses {', '.join(f'`{one}`' for one in found)}."] if found else []
    for name, part in schema.get("properties", {}).items():
        sentences += refused_fields(part, f"{path}.{name}")
    for suffix, part in _parts(schema):
        sentences += refused_fields(part, f"{path}{suffix}")
    return sentences


def rules_of(schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and message of each rule on a field and on the fields below it."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if rule["rule"] != ABOVE_ZERO.expression:
            yield f"{path}{rule.get('fieldPath', '')}", rule["message"]
    for name, part in schema.get("properties", {}).items():
        if not is_refused(part):
            yield from rules_of(part, f"{path}.{name}")
    for suffix, part in _parts(schema):
        yield from rules_of(part, f"{path}{suffix}")


def escaped(text: str) -> str:
    """Return text that Markdown shows as it is, also in a table."""
    entities = {"&": "&amp;", "<": "&lt;", "|": "&#124;", "*": "&#42;", "]": "&#93;"}
    for character, entity in entities.items():
        text = text.replace(character, entity)
    return text


def _pattern(schema: Schema) -> str:
    found = [
        one["pattern"]
        for one in (schema, *(part for _, part in _parts(schema)))
        if "pattern" in one
    ]
    return " ".join(f"Pattern: <code>{escaped(one)}</code>." for one in found)


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if is_above_zero(schema):
        bounds = ["above 0"]
    else:
        bounds = [] if low is None else [f"at least {_number(low)}"]
    if high is not None and high >= INT32_MAX:
        bounds.append("no practical limit")
    elif high is not None and low is not None and not is_above_zero(schema):
        bounds = [f"{_number(low)} to {_number(high)}"]
    elif high is not None:
        bounds.append(f"at most {_number(high)}")
    return "".join(f", {bound}" for bound in bounds)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _length(schema: Schema, what: str, unit: str) -> str:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if high is None:
        return ""
    return f", {_number(low)} to {_number(high)} {unit}" if low else f", at most {high:,} {unit}"


def _default(schema: Schema) -> str:
    default = schema.get("default")
    if default in (None, "") or schema.get("type") == "object":
        return ""
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _parts(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield suffix and schema of the entries of a list or of the values of a map."""
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield suffix, schema[key]


def _below(schema: Schema) -> Iterator[Schema]:
    for one in schema.get("properties", {}).values():
        yield one
        yield from _below(one)
    for _, part in _parts(schema):
        yield from _below(part)

"""Convert the models into a structural OpenAPI v3 schema, as required in a CRD.

`crd.py` calls it. Unknown constructs are refused, because a schema that is too permissive would
accept bad manifests.
"""

import ast
import inspect
import sys
from enum import StrEnum
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from finetune_operator.api.schema import ApiModel, OmitDefault, Rule

Schema = dict[str, Any]

DETAIL = "detail"  # next to a rule's message; `crd.py` removes it
READS = "reads"  # next to a model's rules; `one_rule.py` removes it when it merges the rules
REFUSED = "false"
"""Rule of a field that may not be set."""
INT32_MAX = 2**31 - 1
_LENGTHS = {"string": "Length", "array": "Items", "object": "Properties"}


def is_refused(schema: Schema) -> bool:
    """Whether a rule refuses every value of a field."""
    return any(rule["rule"] == REFUSED for rule in schema.get("x-kubernetes-validations", ()))


def object_schema(model: type[ApiModel]) -> Schema:
    """Return the schema of `model`, including its rules.

    Raises:
        TypeError: A field uses a construct without a structural form.
    """
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        properties[key] = field_schema(model, name)
        if field.is_required():
            required.append(key)
    first_paragraph = (model.__doc__ or "").strip().split("\n\n")[0]
    schema: Schema = {"description": " ".join(first_paragraph.split()), "type": "object"}
    schema["properties"] = properties
    if required:
        schema["required"] = required
    if model.cel_reads:
        schema[READS] = model.cel_reads
    return with_rules(schema, model.cel_rules)


def field_schema(model: type[ApiModel], name: str) -> Schema:
    """Return the schema of the field `name`: its type, description, default and rules.

    Raises:
        TypeError: The field uses a construct without a structural form.
    """
    field = model.model_fields[name]
    description = field.description or _docstrings(model.__module__).get((model.__name__, name))
    try:
        return _field_schema(field, description)
    except TypeError as error:
        raise TypeError(f"{model.__name__}.{name}: {error}") from error


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings below fields, by class and field.

    Pydantic's `use_attribute_docstrings` would parse the source of each class at import, which
    takes 0.1 s in every command.
    """
    found = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for model in (one for one in tree.body if isinstance(one, ast.ClassDef)):
        for field, text in pairwise(model.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[model.name, name] = " ".join(words.split())
    return found


def _field_schema(field: FieldInfo, description: str | None) -> Schema:
    schema = _type_schema(field.annotation, tuple(field.metadata))
    if description:
        schema.pop("description", None)  # the type's own
        schema = {"description": description, **schema}
    is_omitted = any(isinstance(item, OmitDefault) for item in field.metadata)
    if not is_omitted and not field.is_required() and field.default is not None:
        default = _plain(field.default)
        if not _is_empty(default):
            schema["default"] = default
    if isinstance(field.json_schema_extra, dict):
        schema.update(field.json_schema_extra)
    return schema


def _plain(default: Any) -> Any:
    """Return a default as JSON, including all nested defaults.

    The API server evaluates rules on a default before it fills in nested defaults. A default `{}`
    would therefore break every rule that reads a field in it.
    """
    if default is PydanticUndefined:
        raise TypeError("a default factory cannot be written into a CRD; give the value")
    if isinstance(default, BaseModel):
        dumped = default.model_dump(by_alias=True, exclude_none=True, mode="json")
        return _without_empty(dumped)
    if isinstance(default, StrEnum):
        return default.value
    if isinstance(default, list):
        return [_plain(item) for item in default]
    return default


def _is_empty(default: Any) -> bool:
    """Whether a default is an empty list or mapping, which means the same as an absent value."""
    return default in ([], {})


def _without_empty(part: Any) -> Any:
    if isinstance(part, dict):
        kept = {key: _without_empty(item) for key, item in part.items()}
        return {key: item for key, item in kept.items() if not _is_empty(item)}
    if isinstance(part, list):
        return [_without_empty(item) for item in part]
    return part


def _type_schema(annotation: Any, metadata: tuple[Any, ...] = ()) -> Schema:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *outer = get_args(annotation)
        return _type_schema(inner, (*_flat(outer), *metadata))
    if origin in (Union, UnionType):
        return _union_schema(get_args(annotation), metadata)
    schema = _plain_type_schema(annotation, origin)
    for item in metadata:
        _constrain(schema, item)
    if schema["type"] == "integer":
        schema["format"] = "int32" if schema.get("maximum", INT32_MAX + 1) <= INT32_MAX else "int64"
    return with_rules(schema, tuple(item for item in metadata if isinstance(item, Rule)))


def _flat(metadata: list[Any]) -> tuple[Any, ...]:
    """Unpack `Field(...)` inside `Annotated` into its constraints."""
    flat: list[Any] = []
    for item in metadata:
        flat.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return tuple(flat)


def _union_schema(members: tuple[Any, ...], metadata: tuple[Any, ...]) -> Schema:
    """Drop None, because optional fields are not required; `int | Literal` is int-or-string."""
    given = [member for member in members if member is not type(None)]
    if len(given) == 1:
        return _type_schema(given[0], metadata)
    words = [word for member in given if get_origin(member) is Literal for word in get_args(member)]
    numbers = [_type_schema(member) for member in given if get_origin(member) is not Literal]
    if not words or [number["type"] for number in numbers] != ["integer"]:
        raise TypeError(f"{members} is neither optional nor a whole number or a word")
    schema: Schema = {"x-kubernetes-int-or-string": True}
    schema |= {key: numbers[0][key] for key in numbers[0] if key in ("minimum", "maximum")}
    schema["maxLength"] = max(len(word) for word in words)
    return with_rules(schema, tuple(item for item in metadata if isinstance(item, Rule)))


def _plain_type_schema(annotation: Any, origin: Any) -> Schema:
    if origin is list:
        return {"type": "array", "items": _type_schema(get_args(annotation)[0])}
    if origin is dict:
        value = get_args(annotation)[1]
        # A field of dict[str, Any] sets x-kubernetes-preserve-unknown-fields itself.
        return {"type": "object"} | (
            {} if value is Any else {"additionalProperties": _type_schema(value)}
        )
    if not isinstance(annotation, type):
        raise TypeError(f"{annotation} has no structural form")
    if issubclass(annotation, ApiModel):
        return object_schema(annotation)
    if issubclass(annotation, StrEnum):
        return {"type": "string", "enum": [member.value for member in annotation]}
    for python, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if annotation is python:
            return {"type": name}
    raise TypeError(f"{annotation} has no structural form")


def _constrain(schema: Schema, item: Any) -> None:
    if isinstance(item, Rule | OmitDefault):
        return
    if isinstance(item, Ge):
        schema["minimum"] = item.ge
    elif isinstance(item, Le):
        schema["maximum"] = item.le
    elif isinstance(item, MinLen):
        schema["min" + _LENGTHS[schema["type"]]] = item.min_length
    elif isinstance(item, MaxLen):
        schema["max" + _LENGTHS[schema["type"]]] = item.max_length
    elif isinstance(getattr(item, "pattern", None), str):
        schema["pattern"] = item.pattern
    else:
        raise TypeError(f"{item} has no form in a structural schema")


def with_rules(schema: Schema, rules: tuple[Rule, ...]) -> Schema:
    """Add `rules` to `schema`, and return it."""
    if not rules:
        return schema
    validations = schema.setdefault("x-kubernetes-validations", [])
    for rule in rules:
        validation = {"rule": rule.expression, "message": rule.message}
        if rule.message_expression is not None:
            validation["messageExpression"] = rule.message_expression
        if rule.field is not None:
            validation["fieldPath"] = "." + rule.field
        if rule.detail is not None:
            validation[DETAIL] = rule.detail
        validations.append(validation)
    return schema

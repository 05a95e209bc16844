"""Fill in a schema's defaults as the API server does when it reads an object."""

from copy import deepcopy
from typing import Any

from finetune_operator.api.openapi import Schema


def with_defaults(value: Any, schema: Schema) -> Any:
    """Return a copy of `value` with every default of `schema` written out.

    A null where none is allowed counts as absent, so it becomes the default, too; unknown fields
    are kept for `check_structure` to report.
    """
    if isinstance(value, dict):
        return _object_with_defaults(value, schema)
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(item, schema["items"]) for item in value]
    return deepcopy(value)


def _object_with_defaults(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    properties: dict[str, Schema] = schema.get("properties", {})
    made: dict[str, Any] = {}
    for key, item in value.items():
        inner = properties.get(key, schema.get("additionalProperties"))
        if not isinstance(inner, dict):
            made[key] = deepcopy(item)
        elif item is not None:
            made[key] = with_defaults(item, inner)
    for key, inner in properties.items():
        if key not in made and "default" in inner:
            made[key] = with_defaults(inner["default"], inner)
    return made

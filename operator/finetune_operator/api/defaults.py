"""Fill in the defaults of a schema, like the API server when it reads an object."""

from copy import deepcopy
from typing import Any

from finetune_operator.api.openapi import Schema


def with_defaults(value: Any, schema: Schema) -> Any:
    """Return a copy of `value` with every default of `schema`.

    A null that the schema does not allow counts as absent and becomes the default. Unknown fields
    are retained, and `check_structure` reports them.
    """
    if isinstance(value, dict):
        return _object_with_defaults(value, schema)
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(item, schema["items"]) for item in value]
    return deepcopy(value)


def _object_with_defaults(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    properties: dict[str, Schema] = schema.get("properties", {})
    result: dict[str, Any] = {}
    for key, item in value.items():
        inner = properties.get(key, schema.get("additionalProperties"))
        if not isinstance(inner, dict):
            result[key] = deepcopy(item)
        elif item is not None:
            result[key] = with_defaults(item, inner)
    for key, inner in properties.items():
        if key not in result and "default" in inner:
            result[key] = with_defaults(inner["default"], inner)
    return result

"""Tables with the output of `kubectl get`."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import orjson

from finetune_operator.embedded.kinds import Kind
from finetune_operator.kube.resources import Object

_NAME = {"name": "Name", "type": "string", "format": "name", "jsonPath": ".metadata.name"}
_STEP = re.compile(r'\.(?P<field>[\w-]+)|\[\?\(@\.(?P<key>\w+)\s*==\s*"(?P<value>[^"]*)"\)\]')


def table(kind: Kind, items: Iterable[Object], metadata: Object) -> Object:
    """Return objects of a kind as a Table with the metadata of their list."""
    columns = (_NAME, *kind.columns)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [
            {"format": "", "description": "", "priority": 0, **column} for column in columns
        ],
        "rows": [
            {"cells": [_cell(obj, column) for column in columns], "object": obj} for obj in items
        ],
    }


def _cell(obj: Object, column: Object) -> Any:
    value = find(obj, column["jsonPath"])
    if column["type"] == "date":
        return "<unknown>" if value is None else _age(value)
    if isinstance(value, dict | list):
        return orjson.dumps(value).decode()
    return str(value) if column["type"] == "string" and value is not None else value


def find(value: Any, path: str) -> Any:
    """Return the value at a CRD's JSON path, or None.

    Supported are fields, and list items that are selected by the value of a field.
    """
    for step in _STEP.finditer(path):
        if isinstance(value, dict) and step["field"]:
            value = value.get(step["field"])
        elif isinstance(value, list) and step["key"]:
            value = next((item for item in value if item.get(step["key"]) == step["value"]), None)
        else:
            return None
    return value


def _age(since: str) -> str:
    """Return the age of a timestamp in the format of kubectl: 100s, 5m, 4h, 2d."""
    seconds = max(0, int((datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds()))
    for size, unit, limit in ((1, "s", 120), (60, "m", 180), (3600, "h", 48)):
        if seconds < size * limit:
            return f"{seconds // size}{unit}"
    return f"{seconds // 86_400}d"

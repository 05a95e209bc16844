"""Tables: how `kubectl get` is told what to print."""

import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from finetune_operator.embedded.kinds import Kind
from finetune_operator.kube.resources import Object

_STEP = re.compile(
    r"\.(?P<field>(?:[^.\[\\]|\\.)+)"
    r"|\[(?P<index>\d+)\]"
    r"|\[\?\(@\.(?P<key>[\w.]+)\s*==\s*[\"'](?P<value>[^\"']*)[\"']\)\]"
    r"|\[[\"'](?P<quoted>[^\"']+)[\"']\]"
)


def table(kind: Kind, items: Iterable[Object], metadata: Object, include: str) -> Object:
    """Return objects as a Table.

    Args:
        kind: Their kind.
        items: The objects.
        metadata: That of the list.
        include: What a row holds beside its cells: `None`, `Metadata` or `Object`.
    """
    first = {"name": "Name", "type": "string", "format": "name"}
    columns = [first, *kind.columns]
    definitions = [{"format": "", "description": "", "priority": 0, **one} for one in columns]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [
            {key: value for key, value in one.items() if key != "jsonPath"} for one in definitions
        ],
        "rows": [_row(kind, made, include) for made in items],
    }


def _row(kind: Kind, made: Object, include: str) -> Object:
    cells = [made["metadata"]["name"], *(_cell(made, column) for column in kind.columns)]
    partial = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
    shown = {"None": None, "Object": made}.get(include, {**partial, "metadata": made["metadata"]})
    return {"cells": cells, "object": shown}


def _cell(made: Object, column: Object) -> Any:
    found = list(find(made, column["jsonPath"]))
    if not found or found[0] is None:
        return "<unknown>" if column["type"] == "date" else None
    value = found[0]
    if column["type"] == "date":
        return age(str(value))
    if isinstance(value, dict | list):
        return json.dumps(value, separators=(",", ":"))
    return value if column["type"] in ("integer", "number", "boolean") else str(value)


def find(value: Any, path: str) -> Iterator[Any]:
    """Yield what a JSON path of a printer column finds."""
    values = [value]
    for step in _STEP.finditer(path):
        values = [found for one in values for found in _after(one, step)]
    yield from values


def _after(value: Any, step: re.Match[str]) -> Iterator[Any]:
    field = step["field"] or step["quoted"]
    if field is not None and isinstance(value, dict):
        name = field.replace("\\", "")
        if name in value:
            yield value[name]
    elif isinstance(value, list) and step["index"] is not None:
        yield from value[int(step["index"]) :][:1]
    elif isinstance(value, list) and step["key"] is not None:
        yield from (one for one in value if list(find(one, f".{step['key']}")) == [step["value"]])


def age(since: str) -> str:
    """Return how long ago a time was, as kubectl writes it: 5s, 3m20s, 4h, 2d."""
    try:
        then = datetime.fromisoformat(since)
    except ValueError:
        return "<invalid>"
    seconds = max(0, int((datetime.now(UTC) - then).total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 180:
        rest = f"{seconds % 60}s" if minutes < 10 and seconds % 60 else ""
        return f"{minutes}m{rest}"
    if hours < 48:
        rest = f"{minutes % 60}m" if hours < 8 and minutes % 60 else ""
        return f"{hours}h{rest}"
    rest = f"{hours % 24}h" if days < 8 and hours % 24 else ""
    return f"{days}d{rest}" if days < 730 else f"{days // 365}y"

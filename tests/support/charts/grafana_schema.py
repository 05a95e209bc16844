"""Check a dashboard's JSON against Grafana's schema in the models of its SDK."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard, DataTransformerConfig, Panel
from pydantic import ConfigDict, TypeAdapter, ValidationError

_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def schema_problems(board: Mapping[str, Any]) -> list[str]:
    """List the fields that the schema does not have, and the values of another type."""
    register_default_plugins()
    read = Dashboard.from_json(dict(board))
    written = json.loads(JSONEncoder().encode(read))
    return [*_lost(board, written, "dashboard"), *_mistyped(read, "dashboard")]


def _lost(file: Any, written: Any, path: str) -> Iterator[str]:
    """Yield each value that the models drop or change; they may add defaults."""
    if isinstance(file, dict) and isinstance(written, dict):
        for key, value in file.items():
            if key in written:
                yield from _lost(value, written[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: not a field"
    elif isinstance(file, list) and isinstance(written, list) and len(file) == len(written):
        for number, (one, other) in enumerate(zip(file, written, strict=True)):
            yield from _lost(one, other, f"{path}[{number}]")
    elif file != written:
        yield f"{path}: {file!r} is read as {written!r}"


def _mistyped(model: Any, path: str) -> Iterator[str]:
    if isinstance(model, Panel):  # the only models that are read as plain dicts
        model.transformations = [DataTransformerConfig.from_json(one) for one in _dicts(model)]
    if isinstance(model, list):
        for number, one in enumerate(model):
            yield from _mistyped(one, f"{path}[{number}]")
    elif type(model).__module__.startswith("grafana_foundation_sdk.models."):
        for name, checked in _fields(type(model)).items():
            value = getattr(model, name)
            try:
                checked.validate_python(value)
            except ValidationError as error:
                yield f"{path}.{name}: {value!r:.80}: {error.errors()[0]['msg']}"
            yield from _mistyped(value, f"{path}.{name}")


def _dicts(panel: Panel) -> list[dict[str, Any]]:
    found: list[Any] = panel.transformations
    return found


def _fields(model: type[Any]) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(model)
    return {name: TypeAdapter(hint, config=_ANY_CLASS) for name, hint in hints.items()}

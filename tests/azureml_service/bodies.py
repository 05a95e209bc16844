"""Checks what a client puts by the models of Azure's own REST interface, which the SDK brings.

They are private to the SDK, so they may move with a version of it: then this is what fails.
"""

import importlib
import re
import typing
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any

from azureml_service.answers import Json, bad

_SENT_ALL_THE_SAME = {"queueSettings.priority", "parentJobName"}
"""What the SDK sends although the models do not have it."""
_DURATION = re.compile(r"P(?=.)(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}")
_PLAIN: Mapping[Any, Any] = {str: str, int: int, bool: bool, float: (int, float)}


@cache
def models() -> ModuleType:
    """Return the models; the first time takes about a second."""
    return importlib.import_module("azure.ai.ml._restclient.arm_ml_service.models")


def check_job(name: str, body: object) -> Json:
    """Return the properties of a command job.

    Raises:
        RefusalError: the body or the name is not that of a command job.
    """
    if not _NAME.fullmatch(name):
        raise bad(f"The job name {name!r} is not valid.", "BadArgument", "InvalidName")
    problems = list(_of_model(models().JobBase, body, ""))
    if problems:
        raise bad("; ".join(problems), "BadArgument")
    assert isinstance(body, dict)
    properties: Json = body["properties"]
    if properties["jobType"] != "Command":
        raise bad(f"jobType {properties['jobType']} is not run by this service", "BadArgument")
    return properties


def _of_model(model: Any, value: object, path: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{path or 'the body'} is not an object"
        return
    kinds = getattr(model, "__mapping__", None)
    if kinds:
        (field,) = [one for one in _fields(model).values() if one._is_discriminator]
        kind = value.get(field._rest_name)
        if kind not in kinds:
            yield f"{path}.{field._rest_name} is {kind!r}, not one of {', '.join(sorted(kinds))}"
            return
        if kinds[kind] is not model:
            yield from _of_model(kinds[kind], value, path)
            return
    hints, known = _hints(model), set()
    for attribute, field in _fields(model).items():
        name = field._rest_name
        known.add(name)
        hint, inner = hints[attribute], f"{path}.{name}".lstrip(".")
        if value.get(name) is not None:
            if field._visibility == ["read"]:
                yield f"{inner} can only be read"
            elif not field._is_discriminator:
                yield from _of_type(hint, value[name], inner)
        elif type(None) not in typing.get_args(hint) and field._visibility != ["read"]:
            yield f"{inner} is missing"
    for name in value.keys() - known:
        inner = f"{path}.{name}".lstrip(".")
        if inner.removeprefix("properties.") not in _SENT_ALL_THE_SAME:
            yield f"{inner} is not known"


def _of_type(hint: Any, value: object, path: str) -> Iterator[str]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return
    if origin is typing.Union:
        enums = [one for one in arguments if isinstance(one, type) and issubclass(one, Enum)]
        if enums:
            values = [one.value for kind in enums for one in kind]
            if value not in values:
                yield f"{path} is {value!r}, not one of {', '.join(values)}"
            return
        (inner,) = [one for one in arguments if one is not type(None)]
        yield from _of_type(inner, value, path)
    elif origin is dict:
        if not isinstance(value, Mapping):
            yield f"{path} is not an object"
            return
        for key, one in value.items():
            if one is not None:
                yield from _of_type(arguments[1], one, f"{path}.{key}")
    elif origin is list:
        if not isinstance(value, list):
            yield f"{path} is not a list"
            return
        for index, one in enumerate(value):
            yield from _of_type(arguments[0], one, f"{path}[{index}]")
    elif hint is timedelta:
        if not isinstance(value, str) or not _DURATION.fullmatch(value):
            yield f"{path} is {value!r}, not a duration"
    elif hint in _PLAIN:
        if not isinstance(value, _PLAIN[hint]) or (hint is not bool and isinstance(value, bool)):
            yield f"{path} is {value!r}, not {hint.__name__}"
    else:
        yield from _of_model(hint, value, path)


@cache
def _fields(model: Any) -> dict[str, Any]:
    model({})  # the first of a model finds its fields; before, it has those of its base
    found: dict[str, Any] = model._attr_to_rest_field
    return found


@cache
def _hints(model: Any) -> dict[str, Any]:
    found = models()
    return typing.get_type_hints(model, {**vars(typing), **vars(found), "_models": found}, {})

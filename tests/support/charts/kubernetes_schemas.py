"""The schemas of Kubernetes itself, of every minor version, from the package kubernetes-validate.

Strict: a field that a version does not know is a fault. That package reads all schemas of a version
again for each object, which takes a second; here they are read once.
"""

import json
import re
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import pytest

Json = dict[str, Any]

needs_schemas = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None,
    reason="kubernetes-validate is not installed, which has the schemas (make install)",
)


def minors(first: str) -> list[str]:
    """Return the minor versions that have schemas, from `first` on, such as `1.30`."""
    found = [
        match[1]
        for folder in _folder().iterdir()
        if (match := re.fullmatch(r"v(1\.\d+)\.0-local-strict", folder.name))
    ]
    return sorted((one for one in found if _number(one) >= _number(first)), key=_number)


def faults(made: Json, minor: str) -> list[str]:
    """Return what that version would not accept of an object, each with its path."""
    file = _file(made, minor)
    if not file.is_file():
        return [f"{made['apiVersion']} {made['kind']} is no kind of Kubernetes {minor}"]
    found = _validator(file.name, minor).iter_errors(made)
    return [f"{error.json_path}: {error.message}" for error in found]


def _number(minor: str) -> int:
    return int(minor.partition(".")[2])


def _folder() -> Any:
    return files("kubernetes_validate") / "kubernetes-json-schema"


def _file(made: Json, minor: str) -> Any:
    group, _, version = made["apiVersion"].rpartition("/")
    words = [made["kind"].lower(), *group.split(".")[:1], version]
    return _folder() / f"v{minor}.0-local-strict" / f"{'-'.join(filter(None, words))}.json"


@cache
def _validator(file: str, minor: str) -> Any:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    schema = json.loads((_folder() / f"v{minor}.0-local-strict" / file).read_text())
    return Draft202012Validator(schema, registry=_definitions(minor) @ Registry())


@cache
def _definitions(minor: str) -> Any:
    from referencing import Resource

    text = (_folder() / f"v{minor}.0-local-strict" / "_definitions.json").read_text()
    return Resource.from_contents(json.loads(text))

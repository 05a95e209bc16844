"""Label and field selectors, as they stand in a URL."""

import re
from collections.abc import Callable, Iterator

from finetune_operator.embedded.kinds import Kind
from finetune_operator.embedded.refusals import bad_request
from finetune_operator.kube.resources import Object

Matches = Callable[[Object], bool]
_Test = Callable[[str | None], bool]

_SET = re.compile(r"(?P<key>\S+)\s+(?P<no>not)?in\s+\((?P<values>[^)]*)\)")
_EQUAL = re.compile(r"(?P<key>[^=!\s]+)\s*(?P<no>!)?={1,2}\s*(?P<value>\S*)")
_SPLIT = re.compile(r",(?![^(]*\))")


def selects(kind: Kind, labels: str, fields: str) -> Matches:
    """Return whether an object has the labels and fields that are asked for.

    Raises:
        RefusalError: a selector cannot be read, or a custom resource has no such field selector.
    """
    label_tests = list(_label_tests(labels))
    field_tests = list(_field_tests(kind, fields))

    def matches(made: Object) -> bool:
        there = made["metadata"].get("labels") or {}
        return all(test(there.get(key)) for key, test in label_tests) and all(
            test(_field(made, path)) for path, test in field_tests
        )

    return matches


def _label_tests(text: str) -> Iterator[tuple[str, _Test]]:
    for part in filter(None, (one.strip() for one in _SPLIT.split(text))):
        if found := _SET.fullmatch(part):
            values = {one.strip() for one in found["values"].split(",")}
            yield found["key"], _test(values, is_in=not found["no"])
        elif found := _EQUAL.fullmatch(part):
            yield found["key"], _test({found["value"]}, is_in=not found["no"])
        elif re.fullmatch(r"!?\s*[\w./-]+", part):
            key = part.lstrip("! ")
            yield key, (_is_absent if part.startswith("!") else _is_there)
        else:
            raise bad_request(f"unable to parse requirement: {part}")


def _field_tests(kind: Kind, text: str) -> Iterator[tuple[str, _Test]]:
    for part in filter(None, text.split(",")):
        found = _EQUAL.fullmatch(part)
        if found is None:
            raise bad_request(f"invalid selector: '{part}'; can't understand '{part}'")
        key = found["key"]
        if kind.is_custom and key not in ("metadata.name", "metadata.namespace"):
            raise bad_request(f"field label not supported: {key}")
        yield key, _test({found["value"]}, is_in=not found["no"])


def _test(values: set[str], *, is_in: bool) -> _Test:
    return lambda value: (value in values) is is_in


def _is_there(value: str | None) -> bool:
    return value is not None


def _is_absent(value: str | None) -> bool:
    return value is None


def _field(made: Object, path: str) -> str:
    value: object = made
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)

"""Values that the CRD accepts but that this version does not support.

`ftctl validate` and `load_job` refuse them, so that no value is ignored silently. An entry of the
table is removed when the value is supported.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from finetune_operator.api.paths import FieldPath, Finding, is_scalar, show_value
from finetune_operator.api.v1alpha1.job import MANAGED_BY
from finetune_trainer.config import FailureClass


@dataclass(frozen=True)
class Unbuilt:
    """A field of the spec with values that have no effect yet.

    Attributes:
        path: Path below `spec`; `[]` stands for every item of a list.
        values: The supported values; empty if no value has an effect.
        advice: Remedy for users.
    """

    path: str
    values: tuple[Any, ...]
    advice: str


def only(path: str, *values: Any) -> Unbuilt:
    """Return the entry of a field that supports only these values."""
    words = [str(value) for value in values]
    listed = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return Unbuilt(path, values, f"use {listed}")


def unset(path: str, advice: str = "remove it") -> Unbuilt:
    """Return the entry of a field without any effect."""
    return Unbuilt(path, (), advice)


_FAILURES = tuple(one.value for one in FailureClass if one is not FailureClass.COMPLETED)

UNBUILT = (
    only("strategy.tensorParallel", 1),
    only("strategy.pipelineParallel", 1),
    unset("topology.minNodes"),
    unset("topology.maxNodes"),
    only("restartPolicy.rules[].onClass", *_FAILURES),
    only("managedBy", MANAGED_BY),
)
"""Values that no backend supports. Each backend also refuses values that only it does not support.
"""


def check_built(value: Any) -> Iterator[Finding]:
    """Yield a finding for each unsupported value of an object with its defaults."""
    return check_fields(value, UNBUILT, "is not supported yet")


def check_fields(value: Any, table: Iterable[Unbuilt], complaint: str) -> Iterator[Finding]:
    """Yield a finding with this complaint for each value that `table` marks as unsupported."""
    for entry in table:
        for path, item in _values_at(value, ("spec", *entry.path.split("."))):
            if item not in entry.values:
                shown = f"{show_value(item)} " if is_scalar(item) else ""
                yield Finding(path, f"{shown}{complaint}; {entry.advice}")


def _values_at(
    value: Any, parts: tuple[str, ...], path: FieldPath = ()
) -> Iterator[tuple[FieldPath, Any]]:
    if not parts:
        yield path, value
        return
    name = parts[0].removesuffix("[]")
    if not isinstance(value, dict) or name not in value:
        return
    if not parts[0].endswith("[]"):
        yield from _values_at(value[name], parts[1:], (*path, name))
    elif isinstance(value[name], list):
        for index, item in enumerate(value[name]):
            yield from _values_at(item, parts[1:], (*path, name, index))

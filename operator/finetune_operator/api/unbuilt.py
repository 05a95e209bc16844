"""What the resource can say and this version does not do yet: nothing is silently ignored.

The CRD accepts these values, so that manifests written for a later version keep their form;
`ftctl validate` and `load_job` refuse them. A line leaves the table when its behaviour is built.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from finetune_operator.api.paths import FieldPath, Finding, is_scalar, show_value
from finetune_operator.api.v1alpha1.job import MANAGED_BY
from finetune_trainer.config import FailureClass


@dataclass(frozen=True)
class Unbuilt:
    """One field of the spec with values that do nothing yet.

    Attributes:
        path: Path below `spec`; `[]` stands for every item of a list.
        is_built: Tells whether a value that is set is acted on.
        advice: What to do instead.
    """

    path: str
    is_built: Callable[[Any], bool]
    advice: str


def _only(path: str, *values: Any) -> Unbuilt:
    words = [str(value) for value in values]
    listed = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return Unbuilt(path, lambda value: value in values, f"use {listed}")


def _unset(path: str) -> Unbuilt:
    return Unbuilt(path, lambda value: False, "remove it")


def _starts(path: str, *starts: str) -> Unbuilt:
    return Unbuilt(path, lambda value: str(value).startswith(starts), f"use {' or '.join(starts)}")


_FAILURES = tuple(one.value for one in FailureClass if one is not FailureClass.COMPLETED)

UNBUILT = (
    _starts("model.source", "hf://", "file://"),
    _unset("model.tokenSecretRef"),
    _starts("dataset.source", "hf://", "file://"),
    _starts("dataset.evalSource", "hf://", "file://"),
    _starts("dataset.also[].source", "hf://", "file://"),
    _starts("method.lora.startFrom", "file://"),
    _only("strategy.tensorParallel", 1),
    _only("strategy.pipelineParallel", 1),
    _unset("topology.minNodes"),
    _unset("topology.maxNodes"),
    _unset("topology.instanceType"),
    _only("topology.rdma", "auto"),
    _only("topology.placement", "pack"),
    _only("capacity", "onDemand"),
    _starts("checkpoint.uri", "file://"),
    _starts("checkpoint.resumeFrom", "auto", "none", "file://"),
    _starts("output.uri", "file://"),
    _only("restartPolicy.rules[].onClass", *_FAILURES),
    _unset("queue"),
    _unset("ttlSecondsAfterFinished"),
    _unset("podTemplate"),
    _only("managedBy", MANAGED_BY),
)


def check_built(value: Any) -> Iterator[Finding]:
    """Yield a finding for each value that nothing acts on yet, in an object with its defaults."""
    for entry in UNBUILT:
        for path, item in _values_at(value, ("spec", *entry.path.split("."))):
            if not entry.is_built(item):
                shown = f"{show_value(item)} " if is_scalar(item) else ""
                yield Finding(path, f"{shown}is not built yet; {entry.advice}")


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

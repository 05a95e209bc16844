"""Builders of valid values that tests change in the one place they are about."""

from collections.abc import Mapping
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic.alias_generators import to_camel

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import AttemptRef, Handle
from finetune_operator.kube.cache import Key
from finetune_operator.planner.plan import Plan, make_plan

_BASE: dict[str, Any] = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTuneJob",
    "metadata": {"name": "tiny", "namespace": "default"},
    "spec": {
        "model": {"source": "file://./model"},
        "dataset": {"source": "file://./train.jsonl", "format": "chat"},
        "method": {"type": "lora"},
        "training": {"globalBatchSize": 4, "maxSteps": 10, "learningRate": 1e-4},
        "topology": {"nodes": 1, "gpusPerNode": 0, "processesPerNode": 1},
        "backend": {"type": "local"},
    },
}
_TOP_LEVEL = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})


def manifest(*, name: str | None = None, **overrides: Any) -> dict[str, Any]:
    """Return a valid manifest of the local backend, changed in `overrides`.

    A key is a path below `spec` with `.` or `__` between its parts (`training__max_steps`,
    `"training.maxSteps"`), or starts at the top with `metadata`, `status`, `kind`, `apiVersion`.
    Parts of a key become camelCase; a mapping as value is merged as it is; None removes the field.
    """
    made = deepcopy(_BASE)
    if name is not None:
        made["metadata"]["name"] = name
    for key, value in overrides.items():
        path = [to_camel(part) for part in key.replace("__", ".").split(".")]
        _put(made, path if path[0] in _TOP_LEVEL else ["spec", *path], value)
    return made


def job(*, name: str | None = None, **overrides: Any) -> FineTuneJob:
    """Return `manifest(...)` as the model."""
    return FineTuneJob.model_validate(manifest(name=name, **overrides))


def planned(uid: str = "uid-1", **overrides: Any) -> Plan:
    """Return the plan of a job with a uid."""
    made = job(**overrides)
    metadata = made.metadata.model_copy(update={"uid": uid})
    return make_plan(made.model_copy(update={"metadata": metadata}))


def ref_to(handle: Handle, job_uid: str = "uid-1", number: int = 1) -> AttemptRef:
    """Return the attempt as the kernel would name it to a backend, with a spec it cannot read."""
    return AttemptRef(Key("default", "tiny"), job_uid, number, handle)


def after(seconds: float) -> datetime:
    """Return the time in so many seconds."""
    return datetime.now(UTC) + timedelta(seconds=seconds)


def _put(target: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, last = path
    for part in parents:
        target = target.setdefault(part, {})
    if value is None:
        target.pop(last, None)
    elif isinstance(value, Mapping) and isinstance(target.get(last), dict):
        for key, item in value.items():
            _put(target[last], [key], item)
    else:
        target[last] = deepcopy(value)

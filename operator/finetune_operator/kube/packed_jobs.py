"""Packed FineTuneJobs: the form in which the cache of jobs holds them.

A packed job has the fields that are read for all jobs at once, such as by the work queue, and the
whole object as a JSON text. Decoded objects take up to 30 times the memory of their text, and
parsed jobs take even more; authors of jobs choose how many there are and how large they are.
"""

from functools import lru_cache
from typing import Any

from finetune_operator.api.v1alpha1.topology import backend_name
from finetune_operator.kube.resources import Object
from finetune_operator.kube.watch import trim_metadata

_METADATA = (
    *("name", "namespace", "uid", "resourceVersion"),
    *("generation", "creationTimestamp", "deletionTimestamp"),
)
_SPEC = ("managedBy",)
_STATUS = ("observedGeneration", "completionTime")


def pack(obj: Object) -> Object:
    """Return a packed job.

    Besides the text it has the names, versions and times in `metadata`, `spec.backend.type`,
    `spec.managedBy`, and of the status `observedGeneration`, `completionTime` and the types of the
    conditions that are true.
    """
    import orjson  # `ftctl validate` does not need it

    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    conditions = [
        _true(condition["type"])
        for condition in status.get("conditions") or ()
        if condition.get("status") == "True"
    ]
    return {
        "metadata": _some(obj["metadata"], _METADATA),
        "spec": {**_some(spec, _SPEC), "backend": _backend(backend_name(spec.get("backend")))},
        "status": {**_some(status, _STATUS), "conditions": conditions},
        # A copy, because the buffer of orjson is up to twice as large as the text.
        "text": bytes(memoryview(orjson.dumps(trim_metadata(obj)))),
    }


def unpack(packed: Object) -> Object:
    """Return the whole job without managedFields; a job that is not packed is returned as is."""
    import orjson

    if "text" not in packed:
        return packed
    obj: Object = orjson.loads(packed["text"])
    return obj


def size_of(packed: Object) -> int:
    """Return the number of bytes of a packed job's text; 0 for a job that is not packed."""
    return len(packed.get("text", b""))


def _some(fields: dict[str, Any], names: tuple[str, ...]) -> Object:
    return {name: fields[name] for name in names if name in fields}


@lru_cache(maxsize=64)
def _true(condition: str) -> Object:
    """Return a condition that is true, one object for all jobs."""
    return {"type": condition, "status": "True"}


@lru_cache(maxsize=64)
def _backend(name: str) -> Object:
    """Return a backend, one object for all jobs."""
    return {"type": name}

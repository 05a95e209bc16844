"""Watched kinds of objects and their cached fields; each backend declares its own."""

from collections.abc import Callable
from dataclasses import dataclass

from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import Object, Resource

Trim = Callable[[Object], Object]
"""Returns the fields of an object that are cached."""


def trim_metadata(obj: Object) -> Object:
    """Return an object without managedFields."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return {**obj, "metadata": metadata}


@dataclass(frozen=True)
class Watch:
    """A kind whose events requeue a job.

    Backends share one cache per kind: two backends that watch the same kind must trim it equally.

    Attributes:
        selector: Label selector; None if objects of the kind do not belong to a single job.
        trim: Returns the cached fields of an object.
        is_vital: Whether no job is reconciled while the kind cannot be listed and watched.
    """

    resource: Resource
    selector: str | None = JOB_UID_LABEL
    trim: Trim = trim_metadata
    is_vital: bool = True

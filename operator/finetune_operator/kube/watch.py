"""Which objects of a kind are watched, and what is kept of each; a backend lists its own."""

from collections.abc import Callable
from dataclasses import dataclass

from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import Object, Resource

Trim = Callable[[Object], Object]
"""Returns what is kept of an object."""


def trim_metadata(made: Object) -> Object:
    """Keep everything but managedFields."""
    metadata = {key: value for key, value in made["metadata"].items() if key != "managedFields"}
    return {**made, "metadata": metadata}


@dataclass(frozen=True)
class Watch:
    """A kind whose events have a job reconciled.

    Caches are shared by kind: two backends that name one kind must keep the same of it.

    Attributes:
        selector: Label selector; None where objects of the kind belong to no single job.
        trim: What is kept of an object.
        is_vital: Whether no job is reconciled while its objects cannot be listed and watched.
    """

    resource: Resource
    selector: str | None = JOB_UID_LABEL
    trim: Trim = trim_metadata
    is_vital: bool = True

"""`{namespace}` and `{name}` in URIs of a job: a copied manifest is renamed in one place.

`FineTuneJob` puts in the job's own as it is read, so that whoever has a job sees plain URIs: each
backend, what `ftctl render` prints, and `job.json`. The object in the API keeps the placeholders.
"""

from collections.abc import Mapping
from typing import Any

from finetune_operator.api.schema import Rule

NAMES = ("namespace", "name")

ONLY_KNOWN = Rule(
    f"self.matches('^([^{{}}]|[{{]({'|'.join(NAMES)})[}}])*$')",
    "holds a brace that is no placeholder; known are {namespace} and {name}, which stand for the "
    "job's own: use these, or leave the brace out",
)
"""For every field in which placeholders are replaced."""

_FIELDS = (
    ("model", "source"),
    ("dataset", "source"),
    ("dataset", "evalSource"),
    ("method", "lora", "startFrom"),
    ("checkpoint", "uri"),
    ("checkpoint", "resumeFrom"),
    ("output", "uri"),
    ("backend", "local", "runDirectory"),
)


def with_names(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object of a job with each placeholder replaced; what is malformed stays.

    Args:
        job: As it stands in JSON; it is not changed.
    """
    metadata, spec = job.get("metadata"), job.get("spec")
    if not isinstance(metadata, Mapping) or not isinstance(spec, Mapping):
        return job
    named = {"namespace": metadata.get("namespace", "default"), "name": metadata.get("name")}
    known = {f"{{{key}}}": text for key, text in named.items() if isinstance(text, str)}
    for path in _FIELDS:
        spec = _replaced(spec, path, known)
    dataset = spec.get("dataset")
    if isinstance(dataset, Mapping) and isinstance(also := dataset.get("also"), list):
        parts = [_replaced(one, ("source",), known) for one in also]
        spec = {**spec, "dataset": {**dataset, "also": parts}}
    return {**job, "spec": spec}


def _replaced(value: Any, path: tuple[str, ...], known: Mapping[str, str]) -> Any:
    """Return a copy of the value with the text at the path replaced, if it has one."""
    if not path:
        if isinstance(value, str):
            for placeholder, text in known.items():
                value = value.replace(placeholder, text)
        return value
    field, *rest = path
    if not isinstance(value, Mapping) or field not in value:
        return value
    return {**value, field: _replaced(value[field], tuple(rest), known)}

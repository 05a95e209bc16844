"""Replace `{namespace}` and `{name}` in URIs of a job, so that a copy needs only a new name.

`FineTuneJob` replaces them when it is parsed, so backends, `ftctl render` and `job.json` get URIs
without placeholders. The object in the API retains them.
"""

from collections.abc import Mapping
from typing import Any

from finetune_operator.api.schema import Rule

NAMES = ("namespace", "name")

ONLY_KNOWN = Rule(
    f"self.matches('^([^{{}}]|[{{]({'|'.join(NAMES)})[}}])*$')",
    "contains a brace that is not a placeholder; use {namespace} or {name}, which stand for those "
    "of the job, or remove the brace",
)
"""Rule of every field in which placeholders are replaced."""

_FIELDS = (
    ("model", "source"),
    ("dataset", "source"),
    ("dataset", "also", "source"),
    ("dataset", "evalSource"),
    ("method", "lora", "startFrom"),
    ("checkpoint", "uri"),
    ("checkpoint", "resumeFrom"),
    ("output", "uri"),
    ("backend", "local", "runDirectory"),
)


def with_names(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of a job's JSON with placeholders replaced; malformed parts are unchanged."""
    metadata, spec = job.get("metadata"), job.get("spec")
    if not isinstance(metadata, Mapping) or not isinstance(spec, Mapping):
        return job
    named = {"namespace": metadata.get("namespace", "default"), "name": metadata.get("name")}
    known = {f"{{{key}}}": text for key, text in named.items() if isinstance(text, str)}
    for path in _FIELDS:
        spec = _replaced(spec, path, known)
    return {**job, "spec": spec}


def _replaced(value: Any, path: tuple[str, ...], known: Mapping[str, str]) -> Any:
    """Return a copy with the text at the path replaced; a path covers all items of a list."""
    if isinstance(value, list):
        return [_replaced(one, path, known) for one in value]
    if not path:
        if isinstance(value, str):
            for placeholder, text in known.items():
                value = value.replace(placeholder, text)
        return value
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    return {**value, path[0]: _replaced(value[path[0]], path[1:], known)}

"""Write `api-status.md`: each name added since the latest release, with its promise.

`generate` calls it. A field may change until it is listed in `STABLE`.
"""

from collections.abc import Iterable, Iterator

from api_surface import Surface
from field_table import direct_fields, escaped, fields_below
from finetune_operator.api.crd import job_schema, profile_schema

STABLE = {
    "FineTuneJob": (
        "spec.backend.kubernetes",
        "spec.dataset.evalShare",
        "spec.observability.trackers",
        "spec.output.dtype",
        "status.attempts[]",
        "status.trackers",
    ),
    "FineTuneProfile": (
        "spec.allow",
        "spec.nodes.unreachableSeconds",
        "spec.volumes[].shared",
        "spec.volumes[].subPath",
    ),
}
"""Stable additions, each with all fields below it. The settings of profiles may change, because
they follow torch.profiler and Nsight Systems, and the transport is text from NCCL.
"""
_PAGES = {"FineTuneJob": "finetunejob.md", "FineTuneProfile": "finetuneprofile.md"}
_TITLES = {
    "phases": "Phases",
    "conditions": "Conditions",
    "reasons": "Reasons of conditions",
    "failure classes": "Failure classes",
    "Events": "Reasons of Events",
    "metrics": "Metric families",
}
_HEAD = """\
# API status

Generated from the models, conditions and metrics in the code; `make generate` writes it.

The API version is `finetune.dev/v1alpha1`. The next one is `v1beta1`. Each name has a promise:

- **stable**: manifests, stored objects, alerts and scripts that use the name work with every later
  release of `v1alpha1` and with `v1beta1`, with the same meaning.
- **may change**: a later release may rename or remove it. [CHANGELOG.md](../../CHANGELOG.md) names
  it, and [upgrading.md](../upgrading.md) describes what to do.

Everything that release {version} has is stable: {counts}.

Phases, conditions, reasons, failure classes and metric families are stable from their first
release, because alerts and scripts match them. A test requires a line in the changelog for each
name that is removed.

## Rules for new fields

- The name contains the unit: `pendingSeconds`, `everySteps`.
- Absent means the behaviour of the release before.
- The schema has no default ([reason](../decisions/0068-definitions-only-go-forward.md)). The
  description states what absent means.
- A new field may change until it is marked as stable.
"""


def page(today: Surface, version: str, before: Surface) -> str:
    """Return the page, given the names of today and of the release `version`."""
    counts = ", ".join(f"{len(names)} {_plural(kind)}" for kind, names in before.items())
    lines = [_HEAD.format(version=version, counts=counts), f"## Added since {version}\n"]
    for kind, descriptions in _descriptions().items():
        added = difference(today, before, kind)
        lines += [f"### Fields of {kind}\n", *_fields(kind, added, descriptions)]
    for kind, title in _TITLES.items():
        added = difference(today, before, kind)
        lines += [f"### {title}\n", f"Stable: {_listed(added)}.\n" if added else "None.\n"]
    lines.append(f"## Removed since {version}\n")
    removed = [name for kind in before for name in difference(before, today, kind)]
    return "\n".join([*lines, f"{_listed(removed)}.\n" if removed else "None.\n"])


def _plural(kind: str) -> str:
    title = _TITLES.get(kind, f"Fields of {kind}")
    return title[0].lower() + title[1:]


def promise(kind: str, path: str) -> str:
    """Return the promise about a new field."""
    is_stable = any(path == one or path.startswith((f"{one}.", f"{one}[")) for one in STABLE[kind])
    return "stable" if is_stable else "may change"


def difference(some: Surface, others: Surface, kind: str) -> list[str]:
    """Return the names in `some` and not in `others`."""
    return [name for name in some[kind] if name not in others.get(kind, ())]


def _descriptions() -> dict[str, dict[str, str]]:
    schemas = {"FineTuneJob": job_schema(), "FineTuneProfile": profile_schema()}
    return {
        kind: {
            field.path: field.schema["description"]
            for part in direct_fields(schema)
            if part.path in ("spec", "status")
            for field in fields_below(part.schema, part.path)
        }
        for kind, schema in schemas.items()
    }


def _fields(kind: str, added: Iterable[str], descriptions: dict[str, str]) -> Iterator[str]:
    rows = [
        f"| `{path}` | {promise(kind, path)} | {escaped(descriptions[path])} |" for path in added
    ]
    if not rows:
        yield "None.\n"
        return
    yield f"Types and limits: [{kind}]({_PAGES[kind]}).\n"
    yield from ["| Field | Promise | Description |", "|---|---|---|", *rows, ""]


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

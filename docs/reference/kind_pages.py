"""Write `finetunejob.md` and `finetuneprofile.md` from the models of the API; `generate` calls it.

A new field is on its page without an edit. A new block comes after the blocks of `_JOB_ORDER`
or `_PROFILE_ORDER`, and needs an example in `block_examples.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import backend_notes
import block_examples
from field_table import direct_fields, escaped, fields_below, refused_fields, rules_of, table
from finetune_operator.api.openapi import Schema
from finetune_operator.api.v1alpha1.transitions import NEVER_CHANGES, ONLY_WHILE_SUSPENDED

# As the author of a first manifest needs them.
_JOB_ORDER = (
    *("model", "dataset", "method", "training", "topology", "backend", "checkpoint", "output"),
    *("strategy", "restartPolicy", "deadlines", "observability", "queue", "podTemplate"),
)
_PROFILE_ORDER = ("image", "azureml", "allow", "volumes", "nodes", "resources", "network")
_GENERATED = """\
Generated from the models in `finetune_operator/api`; `make generate` writes it.
[API status](api-status.md) has the promise of each new field.
"""
_EDITOR = """
For completion and checks in an editor with the YAML language server (VS Code, Neovim, IntelliJ),
write the schemas with `ftctl crd --format jsonschema --write schemas`, and begin the manifest with

```yaml
# yaml-language-server: $schema=schemas/{file}
```

One schema for files that contain both kinds: `ftctl crd --format jsonschema`. A schema checks
names, types and limits. `ftctl validate` checks the rules, too.
"""
_JOB_HEAD = """
A namespaced resource, `finetune.dev/v1alpha1`: one fine-tuning job. `ftctl init` writes one for
your model and data, `ftctl validate` checks it. For example:

```yaml
{manifest}```
"""
_PROFILE_HEAD = """
A cluster-scoped resource, `finetune.dev/v1alpha1`: settings of an administrator for all jobs that
name the profile ([security](../security.md) explains `allow`). For example:

```yaml
{manifest}```
"""
_STATUS = """## Status

The operator writes the status; a status in a manifest is ignored. [status.md](../status.md)
explains phases, conditions and reasons.
"""
_CHANGES = """## Changes of a job

The API server accepts a change of these fields at any time: {always}.

These fields never change: {never}.

All other fields of the spec may change only while the job is suspended (`suspend: true`).
"""


def job_page(schema: Schema) -> str:
    """Return the page of FineTuneJob, given its structural schema."""
    spec, status = (schema["properties"][part] for part in ("spec", "status"))
    return "\n".join(
        [
            "# FineTuneJob\n",
            _GENERATED,
            _JOB_HEAD.strip().format(manifest=block_examples.JOB),
            _EDITOR.format(file="finetunejob.json"),
            "## Spec\n",
            *_part("spec", spec, _JOB_ORDER, block_examples.OF_JOB, backend_notes.job_notes()),
            "## Rules of the whole object\n",
            *_rules(_of_object(schema)),
            _changes(spec),
            _STATUS,
            *_part("status", status),
        ]
    )


def profile_page(schema: Schema) -> str:
    """Return the page of FineTuneProfile, given its structural schema."""
    spec = schema["properties"]["spec"]
    return "\n".join(
        [
            "# FineTuneProfile\n",
            _GENERATED,
            _PROFILE_HEAD.strip().format(manifest=block_examples.PROFILE),
            _EDITOR.format(file="finetuneprofile.json"),
            "## Spec\n",
            *_part(
                "spec",
                spec,
                _PROFILE_ORDER,
                block_examples.OF_PROFILE,
                backend_notes.profile_notes(),
            ),
        ]
    )


def blocks_of(schema: Schema, order: Iterable[str] = ()) -> dict[str, Schema]:
    """Return the fields of a spec or status that have fields themselves, in the order of a page."""
    blocks = {name: part for name, part in schema["properties"].items() if _is_block(part)}
    return {name: blocks[name] for name in dict.fromkeys((*order, *blocks)) if name in blocks}


def _is_block(schema: Schema) -> bool:
    return "properties" in schema.get("items", schema)


def _part(
    root: str,
    schema: Schema,
    order: Iterable[str] = (),
    examples: Mapping[str, str] = MappingProxyType({}),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield the table of a spec or a status, then a section for each block."""
    blocks = blocks_of(schema, order)
    top = {one.path: one for one in direct_fields(schema)}
    rules: dict[str, list[tuple[str, str]]] = {}
    for path, message in rules_of(schema, root):
        name = "".join(path.split(".")[1:2]).removesuffix("[]")
        rules.setdefault(name if name in blocks else "", []).append((path, message))
    yield table((top[name] for name in dict.fromkeys((*order, *top))), root, notes, blocks) + "\n"
    yield from _rules(rules.get("", ()))
    for name, block in blocks.items():
        inner, whole = (block, name) if "items" not in block else (block["items"], f"{name}[]")
        whole = f"{root}.{whole}"
        yield f"### {whole}\n"
        yield " ".join(filter(None, [block["description"], notes.get(f"{root}.{name}")])) + "\n"
        if name in examples:
            yield f"```yaml\n{examples[name]}```\n"
        yield table(fields_below(inner), whole, notes) + "\n"
        for sentence in refused_fields(inner, whole):
            yield f"{sentence}\n"
        yield from _rules(rules.get(name, ()))


def _of_object(schema: Schema) -> Iterator[tuple[str, str]]:
    for rule in schema["x-kubernetes-validations"]:
        yield rule["fieldPath"].removeprefix("."), rule["message"]


def _rules(rules: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list of rules, in which fields with the same message share a line."""
    fields: dict[str, dict[str, None]] = {}
    for path, message in rules:
        fields.setdefault(message, {})[f"`{path.removeprefix('spec.')}`"] = None
    if fields:
        yield "Refused, with this message:\n"
        yield from (f"- {', '.join(some)} {escaped(text)}" for text, some in fields.items())
        yield ""


def _changes(spec: Schema) -> str:
    never = [path for path, text in rules_of(spec, "spec") if text == NEVER_CHANGES.message]
    fixed = {f"spec.{path}" for path in ONLY_WHILE_SUSPENDED} | set(never)
    always = [path for path in _outermost(spec, "spec", fixed) if path not in fixed]
    never.append("spec.backend.type")
    listed = (
        ", ".join(f"`{path.removeprefix('spec.')}`" for path in some) for some in (always, never)
    )
    return _CHANGES.format(always=next(listed), never=next(listed))


def _outermost(schema: Schema, path: str, fixed: set[str]) -> Iterator[str]:
    """Yield the fields below which no field is fixed, or that are fixed themselves."""
    for name, part in schema["properties"].items():
        whole = f"{path}.{name}"
        if any(one.startswith(f"{whole}.") for one in fixed):
            yield from _outermost(part, whole, fixed)
        else:
            yield whole

"""Write the generated parts of the chart: CRDs, schema of the settings, tables of values.

`make crd` runs it after a change of the models, the settings or values.yaml; `python
charts/generate.py --check` only lists outdated files.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel

from finetune_operator.api.crd import crd_files, custom_resource_definition, profile_definition
from finetune_operator.api.crd_revision import unrecorded
from finetune_operator.kernel.settings import Settings
from values_table import Described, described, table

CHART = Path(__file__).parent / "finetune-operator"
SCHEMA = CHART / "values.schema.json"
README = CHART / "README.md"
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/values.md"
_VALUES = "## Values\n"
_PAGE_HEAD = """\
# Values of the Helm chart

Generated from `charts/finetune-operator/values.yaml`; `make generate` writes it.
[installation.md](../installation.md) explains the choices.

"""
_NO_VALUES = frozenset({"lease_namespace", "pod_name", "pod_uid"})  # set by the chart itself
_NUMBER = {
    "type": ["number", "string"],
    "pattern": r"^(0*[1-9][0-9]*(\.[0-9]+)?|0*\.0*[1-9][0-9]*)$",
}
"""More than 0, also as a string, because `helm --set x=0.5` passes a string."""
_KEPT = ("description", "type", "items", "minimum", "maximum", "exclusiveMinimum")


def main() -> int:
    """Write the files, or with `--check` list outdated files; return the exit code."""
    definitions = (custom_resource_definition(), profile_definition())
    if raised := [text for one in definitions if (text := unrecorded(one))]:
        print("\n".join(raised))
        return 1
    wanted = {CHART / "files" / name: text for name, text in crd_files().items()}
    wanted[SCHEMA] = values_schema(SCHEMA.read_text(encoding="utf-8"))
    wanted[README] = readme(README.read_text(encoding="utf-8"))
    wanted[PAGE] = page()
    stale = [file for file, text in wanted.items() if _text_of(file) != text]
    if "--check" in sys.argv[1:]:
        for file in stale:
            print(f"{file.relative_to(ROOT)} is out of date; run: make crd")
        return 1 if stale else 0
    for file in stale:
        file.write_text(wanted[file], encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
    return 0


def values_schema(old: str) -> str:
    """Return the schema with current settings and descriptions; the rest is hand-written."""
    schema = json.loads(old)
    schema["properties"]["settings"] = settings_schema()
    for value in described((CHART / "values.yaml").read_text(encoding="utf-8")):
        _describe(schema, value)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def readme(old: str) -> str:
    """Return the chart's README with the current table of values, its last section."""
    return old.partition(_VALUES)[0] + f"{_VALUES}\n{table((CHART / 'values.yaml').read_text())}"


def page() -> str:
    """Return the page of the values in the reference."""
    values = table((CHART / "values.yaml").read_text(encoding="utf-8"))
    return f"{_PAGE_HEAD}{re.sub('^###', '##', values, flags=re.MULTILINE)}"


def _describe(schema: dict[str, Any], value: Described) -> None:
    """Put the texts of values.yaml into the schema, except beside a reference, which hides them."""
    for name in value.path.split("."):
        schema = schema.get("properties", {}).get(name, {})
    if schema and "$ref" not in schema:
        rest = {key: one for key, one in schema.items() if key != "description"}
        schema.clear()
        schema.update({"description": value.text, **rest})


def settings_schema() -> dict[str, Any]:
    """Return the schema of `settings`, with names in camel case."""
    whole = Settings.model_json_schema()
    properties = {
        to_camel(name): _one(found, whole.get("$defs", {}))
        for name, found in whole["properties"].items()
        if name not in _NO_VALUES
    }
    properties["healthPort"]["minimum"] = 1  # probes need a fixed port
    return {
        "description": "Settings of the operator's process; an empty one is left to it.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _one(found: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if reference := found.get("$ref"):
        target = definitions[reference.rpartition("/")[2]]
        found = {**target, **{key: value for key, value in found.items() if key in _KEPT}}
    for choice in found.get("anyOf", ()):
        if choice["type"] != "null":  # "" means the same in values, and survives every merge
            found = {**found, **choice}
    kept = {key: found[key] for key in _KEPT if key in found}
    if kept.get("type") == "number":
        kept |= _NUMBER
    if words := found.get(
        "enum"
    ):  # templates/_checks.tpl refuses other values, with our own message
        kept["examples"] = words
    return {**kept, "description": found["description"].replace(", by commas", "")}


def _text_of(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


if __name__ == "__main__":
    sys.exit(main())

"""Keys of TRL, Axolotl and LLaMA-Factory in a manifest are explained."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_operator.api.crd import job_schema
from finetune_operator.api.openapi import Schema
from finetune_operator.api.other_tools import entry_of, explanation, replacement
from finetune_operator.api.other_tools_table import TABLE, Entry
from finetune_operator.cli.app import app
from support.api.builders import manifest
from support.api.other_tools import CONFIGURATIONS

ENTRIES = {key: entry for entry in TABLE for key in entry.keys}


def fields(schema: Schema, path: str) -> Iterator[str]:
    """Yield the path of every field."""
    yield path
    for name, inner in schema.get("properties", {}).items():
        yield from fields(inner, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


FIELDS = {*fields(job_schema()["properties"]["spec"], "spec"), "metadata.name"}


def nested(key: str, value: Any = "some value") -> dict[str, Any]:
    """Return `a.b[].c` as mappings and lists around a value."""
    first, _, rest = key.partition(".")
    inner = nested(rest, value) if rest else value
    if first.endswith("[]"):
        return {first.removesuffix("[]"): [inner]}
    return {first: inner}


def shown(key: str) -> str:
    return key.replace("[]", "[0]")


def problems(folder: Path, value: Mapping[str, Any], command: str = "validate") -> dict[str, str]:
    """Return the message for each field."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(dict(value), sort_keys=False))
    result = CliRunner().invoke(app, [command, str(file)])
    assert result.exit_code == 1
    # `main` prints the exception that ends a command.
    output = result.stdout or str(result.exception)
    return dict(re.findall(rf"^{re.escape(str(file))}:\d+: (\S+) (.*)$", output, re.M))


def with_own_place(entry: Entry, place: str, key: str) -> bool:
    """Whether the key has the same name and place here."""
    return f"{place}.{key}" in entry.fields


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.keys[0])
def test_each_field_in_the_table_exists_and_each_missing_field_has_a_reason(entry: Entry) -> None:
    assert {*entry.fields} <= FIELDS
    assert entry.fields or entry.note
    names = {field.rpartition(".")[2] for field in FIELDS}
    # Once a planned field exists, its entry must name it.
    assert not entry.is_planned or not names.intersection(entry.keys)


def test_fields_that_a_note_mentions_exist() -> None:
    words = (word.strip(",;:()") for entry in TABLE for word in entry.note.split())
    assert {word for word in words if word.startswith("spec.")} <= FIELDS


def test_a_key_has_a_single_entry() -> None:
    assert len(ENTRIES) == sum(len(entry.keys) for entry in TABLE)


@pytest.mark.parametrize("tool", CONFIGURATIONS)
def test_the_keys_of_the_most_used_configurations_are_in_the_table(tool: str) -> None:
    keys = {*CONFIGURATIONS[tool].split()}
    assert len({key for text in CONFIGURATIONS.values() for key in text.split()}) >= 90
    missing = {key for key in keys if entry_of(tuple(key.replace("[]", "").split("."))) is None}
    assert not missing


@pytest.mark.parametrize("place", ["spec", "spec.training"])
def test_every_key_in_a_block_of_the_manifest_gets_its_entry(tmp_path: Path, place: str) -> None:
    value = manifest()
    block = value["spec"] if place == "spec" else value["spec"]["training"]
    flat = {key: entry for key, entry in ENTRIES.items() if "." not in key}
    block.update(dict.fromkeys(flat, "some value"))
    lists: dict[str, dict[str, str]] = {}
    for key in ENTRIES.keys() - flat.keys():
        parent, _, name = key.partition(".")
        lists.setdefault(parent, {})[name] = "some value"
    block.update({parent: [items] for parent, items in lists.items()})

    found = problems(tmp_path, value)

    for key, entry in ENTRIES.items():
        field = f"{place}.{key}".replace("datasets.", "datasets[0].")
        field = field.replace("special_tokens.", "special_tokens[0].")
        field = field.replace("fsdp_config.", "fsdp_config[0].")
        if field in FIELDS and field not in entry.fields:
            assert found[field] == f'"some value" must be a mapping of fields; {replacement(entry)}'
        elif not with_own_place(entry, place, key):
            assert found[field] == explanation(entry)


@pytest.mark.parametrize("tool", CONFIGURATIONS)
@pytest.mark.parametrize("kind", [None, "FineTuneJob"], ids=["without a kind", "with a kind"])
def test_a_file_of_another_tool_gets_an_entry_for_every_key(
    tmp_path: Path, tool: str, kind: str | None
) -> None:
    keys = CONFIGURATIONS[tool].split()
    value: dict[str, Any] = {"kind": kind} if kind else {}
    parents = {key.rpartition(".")[0].removesuffix("[]") for key in keys}
    for key in keys:
        if key not in parents:
            merge(value, nested(key))

    found = problems(tmp_path, value)

    for key in keys:
        entry = entry_of(tuple(key.replace("[]", "").split(".")))
        assert entry is not None
        assert found[shown(key)] == explanation(entry), key
    assert ("kind" in found) == (kind is None)
    assert found["apiVersion"] == "is missing; write apiVersion: finetune.dev/v1alpha1"
    assert found["spec"].startswith("is missing")


def merge(target: dict[str, Any], value: dict[str, Any]) -> None:
    for key, item in value.items():
        there = target.setdefault(key, item)
        if isinstance(item, dict):
            merge(there, item)
        elif isinstance(item, list):
            merge(there[0], item[0])


@pytest.mark.parametrize("key", ["reportTo", "report-to", "REPORT_TO"])
def test_the_spelling_of_a_key_does_not_matter(tmp_path: Path, key: str) -> None:
    (field, message), *_ = problems(
        tmp_path, manifest(spec={**manifest()["spec"], key: "wandb"})
    ).items()
    assert field.startswith("spec")
    assert message.startswith("is not a known field; write spec.observability.trackers (")


@pytest.mark.parametrize(
    ("place", "key", "message"),
    [
        pytest.param("spec", "tracking", "write spec.observability.trackers (", id="no guess"),
        pytest.param(
            "spec.training", "dtype", "write spec.training.precision", id="not the output's"
        ),
        pytest.param("spec.dataset", "path", "write spec.dataset.source", id="block of a data set"),
        pytest.param("spec.training", "maxStep", "did you mean maxSteps?", id="typing error"),
        pytest.param("spec", "lora", "did you mean spec.method.lora?", id="own field elsewhere"),
        pytest.param("spec", "path", "is not a known field; remove it", id="key of other blocks"),
        pytest.param("metadata", "run_name", "write metadata.name", id="metadata"),
    ],
)
def test_the_place_of_a_key_decides(tmp_path: Path, place: str, key: str, message: str) -> None:
    value = manifest()
    block = value
    for part in place.split("."):
        block = block[part]
    block[key] = {}

    assert message in problems(tmp_path, value)[f"{place}.{key}"]


def test_keys_within_an_unknown_block_are_explained(tmp_path: Path) -> None:
    value = manifest()
    value["spec"]["hyperparameters"] = {"steps": [{"warmup_ratio": 0.1, "other": 1}]}

    found = problems(tmp_path, value)

    assert {*found} == {"spec.hyperparameters", "spec.hyperparameters.steps[0].warmup_ratio"}


@pytest.mark.parametrize("command", ["run", "preview", "render", "validate"])
def test_every_command_that_reads_a_manifest_explains_the_key(tmp_path: Path, command: str) -> None:
    value = manifest()
    value["spec"]["report_to"] = "wandb"
    del value["apiVersion"]

    found = problems(tmp_path, value, command)

    assert "; write spec.observability.trackers (" in found["spec.report_to"]
    assert found["apiVersion"].startswith("is missing; write ")


def test_a_missing_api_version_hides_no_problem_of_the_backend(tmp_path: Path) -> None:
    value = manifest(topology__nodes=3)
    del value["apiVersion"]

    found = problems(tmp_path, value)

    assert {*found} == {"apiVersion", "spec.training.globalBatchSize"}


def test_other_files_without_a_kind_get_a_single_problem(tmp_path: Path) -> None:
    assert {*problems(tmp_path, {"services": {"web": 1}})} == {"kind"}
    assert {*problems(tmp_path, {"apiVersion": "v1", "spec": {"seed": 1}})} == {"kind"}


def test_a_profile_gets_no_entries_of_jobs(tmp_path: Path) -> None:
    value = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneProfile",
        "metadata": {"name": "a"},
        "spec": {"kubernetes": {"image": "a"}, "plugins": 1},
    }
    assert "write" not in problems(tmp_path, value)["spec.plugins"]

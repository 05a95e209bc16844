"""Pages and JSON schemas of both kinds: every field, its type, and an example of each block."""

import copy
import json
import re
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

import backend_notes
import block_examples
import kind_pages
from field_table import UndescribedFieldError
from finetune_operator.api.crd import (
    custom_resource_definition,
    job_schema,
    profile_definition,
)
from finetune_operator.api.json_schema import json_schemas, schema_of_both
from finetune_operator.api.manifest import Manifest
from finetune_operator.api.openapi import Schema, is_refused
from finetune_operator.api.validation import check_manifest, check_profile
from finetune_operator.api.yaml_documents import read_yaml
from finetune_operator.cli.app import app

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs/reference"
KINDS = {
    "finetunejob": (custom_resource_definition(), block_examples.JOB, block_examples.OF_JOB),
    "finetuneprofile": (profile_definition(), block_examples.PROFILE, block_examples.OF_PROFILE),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def schema_of(kind: str) -> Schema:
    found: Schema = KINDS[kind][0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def page_of(kind: str) -> str:
    return (FOLDER / f"{kind}.md").read_text(encoding="utf-8")


def rows(page: str) -> dict[str, list[str]]:
    """Return the other cells of each row of the tables of fields, by the whole path."""
    found, root = {}, "spec"
    for line in page.splitlines():
        if line == "## Status":
            root = "status"
        elif line.startswith("### "):
            root = line.removeprefix("### ")
        elif name := re.match(r"\| \[?`([^`]+)`", line):
            found[f"{root}.{name[1]}"] = [cell.strip() for cell in line.strip("|").split(" | ")][1:]
    return found


def fields(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    for name, part in schema.get("properties", {}).items():
        if not is_refused(part):
            yield f"{path}{name}", part
            yield from fields(part, f"{path}{name}.")
    for key, suffix in (("items", "[]."), ("additionalProperties", "{}.")):
        if isinstance(schema.get(key), dict):
            yield from fields(schema[key], path.removesuffix(".") + suffix)


def is_below_kubernetes(path: str, table: dict[str, list[str]]) -> bool:
    """Whether the row of an object of Kubernetes lists the field, or an object that contains it."""
    while "." in path:
        path, _, name = path.rpartition(".")
        path = path.removesuffix("[]").removesuffix("{}")
        if f"`{name}`" in "".join(table.get(path, ())).partition(" Fields: ")[2]:
            return True
    return False


@kinds
def test_every_field_is_on_the_page_with_its_type(kind: str) -> None:
    table = rows(page_of(kind))
    parts = schema_of(kind)["properties"]
    wanted = {
        path: part
        for root in ("spec", "status")
        if root in parts
        for path, part in fields(parts[root], f"{root}.")
    }
    assert len(wanted) > 340
    missing = [one for one in wanted.keys() - table.keys() if not is_below_kubernetes(one, table)]
    assert missing == []
    assert table.keys() - wanted.keys() == set()
    words = {"array": ("list of",), "object": ("object", "map to"), "string": ("string", "enum:")}
    for path, (type_, *_) in table.items():
        expected = wanted[path].get("type", "integer")
        assert type_.startswith(words.get(expected, (expected,))), path


def test_rows_have_default_limits_and_backends() -> None:
    table = rows(page_of("finetunejob"))
    assert table["spec.training.microBatchSize"][:2] == [
        "integer, 1 to 65,536, or `auto`",
        "`auto`",
    ]
    assert table["spec.training.maxSteps"][:2] == ["integer, at least 1, no practical limit", ""]
    assert table["spec.training.learningRate"][:2] == ["number, above 0, at most 10", "required"]
    assert table["spec.method.type"][:2] == ["enum: `full`, `lora`, `qlora`", "`lora`"]
    assert table["spec.restartPolicy.rules[].onExitCodes"][0] == (
        "list of integer (1 to 255), at most 32 entries"
    )
    assert table["spec.topology.instanceType"][2].endswith("**Not with backend `local`**.")
    assert "**Backend `azureml`: only `auto`.**" in table["spec.topology.rdma"][2]
    assert "**Only backend `kubernetes`.**" in table["spec.podTemplate"][2]
    assert table["spec.topology.minNodes"][2].endswith("Not supported yet.")
    assert len(table["status.progress.loss"]) == 2
    assert backend_notes.job_notes().keys() - table.keys() == set()
    profile = rows(page_of("finetuneprofile"))
    assert profile["spec.allow.experiments"][2].endswith("**Only backend `azureml`.**")
    assert backend_notes.profile_notes().keys() - profile.keys() == set()


def test_rules_are_below_the_block_of_their_field() -> None:
    text = page_of("finetunejob")
    dataset = text.partition("### spec.dataset\n")[2].partition("###")[0]
    assert "- `dataset.evalSplit` is also the split to train on; use another split\n" in dataset
    # A rule of the whole spec, of the spec's block, and a bound that the type shows.
    topology = text.partition("### spec.topology\n")[2].partition("###")[0]
    assert "- `topology.minNodes` requires checkpoint.uri, " in topology
    assert "greater than 0" not in text
    for kind in KINDS:
        shown = page_of(kind)
        anchors = {
            re.sub(r"[^a-z-]", "", one) for one in re.findall(r"^##+ (.*)$", shown.lower(), re.M)
        }
        assert set(re.findall(r"\]\(#([^)]+)\)", shown)) - anchors == set()


def test_changes_of_a_job_are_listed() -> None:
    text = page_of("finetunejob").partition("## Changes of a job")[2].partition("\n## ")[0]
    assert "at any time: `topology.nodes`, " in text
    assert "never change: `managedBy`, `backend.type`." in text


def test_a_new_field_needs_no_edit_and_a_description() -> None:
    schema = copy.deepcopy(job_schema())
    training = schema["properties"]["spec"]["properties"]["training"]["properties"]
    training["newSetting"] = {"type": "integer", "minimum": 1, "description": "How new."}
    table = rows(kind_pages.job_page(schema))
    assert table["spec.training.newSetting"] == ["integer, at least 1", "", "How new."]
    spec = schema["properties"]["spec"]["properties"]
    spec["newBlock"] = {"type": "object", "description": "A block.", "properties": training}
    assert rows(kind_pages.job_page(schema))["spec.newBlock.newSetting"][2] == "How new."
    del training["newSetting"]["description"]
    with pytest.raises(UndescribedFieldError, match=r"^spec\.training\.newSetting has no descr"):
        kind_pages.job_page(schema)


def parsed(text: str) -> Any:
    (document,) = read_yaml(text, "example")
    return document.value  # type: ignore[union-attr]


def problems(value: dict[str, Any]) -> list[str]:
    check = check_manifest if value["kind"] == "FineTuneJob" else check_profile
    return [f"{one.path} {one.message}" for one in check(Manifest("example", 1, value, {}))]


@kinds
def test_examples_are_valid_and_each_block_has_one(kind: str) -> None:
    _, manifest, examples = KINDS[kind]
    whole = parsed(manifest)
    assert problems(whole) == []
    blocks = kind_pages.blocks_of(schema_of(kind)["properties"]["spec"])
    assert examples.keys() == blocks.keys()
    for name, text in examples.items():
        part = parsed(text)["spec"]
        assert next(iter(part)) == name
        spec = {
            key: one for key, one in whole["spec"].items() if (name, key) != ("azureml", "image")
        }
        assert problems({**whole, "spec": {**spec, **part}}) == [], name
        assert f"```yaml\n{text}```" in page_of(kind)


def keywords(part: Any) -> set[str]:
    if isinstance(part, dict):
        return part.keys() | {key for one in part.values() for key in keywords(one)}
    return {key for one in part for key in keywords(one)} if isinstance(part, list) else set()


def errors(value: Any, schema: Schema) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(value)]


def manifests() -> list[Any]:
    folder = ROOT / "examples"
    files = [
        *folder.glob("*.yaml"),
        *folder.glob("profiles/*.yaml"),
        *folder.glob("gitops/*/*.yaml"),
    ]
    texts = [(file.read_text(encoding="utf-8"), str(file)) for file in files]
    found = [one.value for text, name in texts for one in read_yaml(text, name)]  # type: ignore[union-attr]
    return [one for one in found if str(one["apiVersion"]).startswith("finetune.dev/")]


def test_json_schemas_accept_every_example() -> None:
    schemas = {schema["title"]: schema for schema in json_schemas().values()}
    both = schema_of_both()
    for schema in (*schemas.values(), both):
        jsonschema.Draft7Validator.check_schema(schema)
        assert [one for one in keywords(schema) if one.startswith("x-kubernetes")] == []
    found = manifests()
    assert len(found) > 10
    assert {one["kind"] for one in found} == schemas.keys()
    for value in found:
        assert errors(value, schemas[value["kind"]]) == errors(value, both) == []


def test_json_schemas_find_wrong_names_and_values() -> None:
    schema, both = json_schemas()["finetunejob.json"], schema_of_both()

    def found(**training: Any) -> list[str]:
        value = parsed(block_examples.JOB)
        value["spec"]["training"] |= training
        assert bool(errors(value, both)) == bool(errors(value, schema))
        return errors(value, schema)

    assert found(microBatchSize=4) == found(microBatchSize="auto") == []
    assert found(learningRate=1) == []  # a whole number is a number
    assert found(learnRate=1e-4) == [
        "Additional properties are not allowed ('learnRate' was unexpected)"
    ]
    assert found(microBatchSize="many") != []
    assert found(microBatchSize=0) != []
    assert found(epochs=0) == ["0 is less than or equal to the minimum of 0"]
    (wrong,) = found(schedule="linar")
    assert wrong.endswith("of ['constant', 'linear', 'cosine']")
    value = parsed(block_examples.JOB)
    value["spec"]["podTemplate"] = {"spec": {"hostNetwork": True}}
    assert errors(value, schema) == [
        "Additional properties are not allowed ('hostNetwork' was unexpected)"
    ]


def test_ftctl_prints_one_schema_and_writes_one_for_each_kind(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["crd", "--format", "jsonschema"])
    assert json.loads(printed.stdout) == schema_of_both()
    command = ["crd", "--format", "jsonschema", "--write", str(tmp_path / "new")]
    assert CliRunner().invoke(app, command).exit_code == 0
    shipped = {file.name: file.read_text() for file in (FOLDER / "schemas").iterdir()}
    assert {file.name: file.read_text() for file in (tmp_path / "new").iterdir()} == shipped


def test_a_stale_file_is_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    # By its path, because charts/ has a module of the same name.
    loader = SourceFileLoader("reference_generate", str(FOLDER / "generate.py"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    generate = module_from_spec(spec)
    loader.exec_module(generate)
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["generate.py"])
    assert generate.main() == 0
    (tmp_path / "finetunejob.md").write_text("old")
    (tmp_path / "schemas/finetuneprofile.json").unlink()
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["generate.py", "--check"])
    assert generate.main() == 1
    assert capsys.readouterr().out == (
        "docs/reference/finetunejob.md is out of date; run: make generate\n"
        "docs/reference/schemas/finetuneprofile.json is out of date; run: make generate\n"
    )

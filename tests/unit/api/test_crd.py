"""The CRD: generated, structural, bounded, and equal to the file that is shipped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field
from typer.testing import CliRunner

from finetune_operator.api.crd import (
    crd_files,
    crd_yaml,
    custom_resource_definition,
    profile_definition,
)
from finetune_operator.api.openapi import Schema, is_refused, object_schema
from finetune_operator.api.schema import ABOVE_ZERO, ApiModel, Rule
from finetune_operator.cli.app import app

SHIPPED = Path(__file__).parents[3] / "crds"


def schema_of(definition: dict[str, Any]) -> Schema:
    made: Schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return made


def schema() -> Schema:
    return schema_of(custom_resource_definition())


def both() -> list[tuple[str, Schema]]:
    """Every node of both kinds."""
    return [*nodes(schema()), *nodes(schema_of(profile_definition()))]


def nodes(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    if is_refused(node):
        return
    yield path, node
    for key, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{key}".lstrip("."))
    for key, suffix in (("items", "[]"), ("additionalProperties", "[*]")):
        if key in node:
            yield from nodes(node[key], path + suffix)


def test_shipped_crds_are_what_the_models_say() -> None:
    shipped = {file.name: file.read_text() for file in sorted(SHIPPED.glob("*.yaml"))}
    assert shipped == crd_files(), "run: ftctl crd --write crds"


def test_crds_are_the_same_each_time_they_are_made() -> None:
    assert crd_files() == crd_files()


def test_ftctl_crd_prints_them_and_writes_a_file_each(tmp_path: Path) -> None:
    folder = tmp_path / "crds"
    printed = CliRunner().invoke(app, ["crd"])
    written = CliRunner().invoke(app, ["crd", "--write", str(folder)])
    texts = crd_files()
    assert {file.name: file.read_text() for file in folder.iterdir()} == texts
    assert list(yaml.safe_load_all(printed.stdout)) == [
        yaml.safe_load(one) for one in texts.values()
    ]
    assert written.exit_code == 0


def test_every_string_list_and_map_has_an_upper_bound() -> None:
    bound = {"string": "maxLength", "array": "maxItems"}
    metadata = ("apiVersion", "kind", "metadata")
    unbounded = []
    for path, node in both():
        is_map = node.get("type") == "object" and "properties" not in node
        needed = "maxProperties" if is_map else bound.get(node.get("type", ""))
        if needed and needed not in node and "enum" not in node and path not in metadata:
            unbounded.append(path)
    assert unbounded == []


def is_bounded_below(node: dict[str, Any]) -> bool:
    rules = [rule["rule"] for rule in node.get("x-kubernetes-validations", [])]
    return "minimum" in node or ABOVE_ZERO.expression in rules


def test_every_number_of_the_spec_has_both_bounds() -> None:
    numbers = [
        (path, node)
        for path, node in nodes(schema()["properties"]["spec"])
        if node.get("type") in ("integer", "number") or "x-kubernetes-int-or-string" in node
    ]
    unbounded = [
        path for path, node in numbers if "maximum" not in node or not is_bounded_below(node)
    ]
    assert len(numbers) > 20
    # upper ends that no number can be wrong at
    assert unbounded == ["training.earlyStopping.minDelta"]


def test_no_minimum_is_a_fraction_as_the_api_server_cuts_it_for_whole_values() -> None:
    minimums = {path: node["minimum"] for path, node in nodes(schema()) if "minimum" in node}
    assert {path for path, minimum in minimums.items() if minimum != int(minimum)} == set()


@pytest.mark.parametrize(
    "definition", [custom_resource_definition(), profile_definition()], ids=["job", "profile"]
)
def test_every_field_of_the_spec_has_a_description(definition: dict[str, Any]) -> None:
    fields = [
        (f"{path}.{key}", inner)
        for path, node in nodes(schema_of(definition)["properties"]["spec"])
        for key, inner in node.get("properties", {}).items()
    ]
    assert [path for path, node in fields if not node.get("description")] == []


def test_a_default_object_spells_out_the_defaults_inside_it() -> None:
    spec = schema()["properties"]["spec"]["properties"]
    assert spec["restartPolicy"]["default"] == {
        "maxRestarts": 3,
        "restartsInPlace": 0,
        "backoff": {"baseSeconds": 0, "maxSeconds": 300},
    }


def test_what_is_empty_by_default_is_stored_in_no_object() -> None:
    def empty_parts(value: Any) -> Iterator[Any]:
        if value in ([], {}):
            yield value
        for item in value.values() if isinstance(value, dict) else ():
            yield from empty_parts(item)

    defaults = [(path, node["default"]) for path, node in both() if "default" in node]
    assert len(defaults) > 40
    assert [path for path, default in defaults if list(empty_parts(default))] == []


def test_a_new_job_is_in_progress_before_its_controller_wrote_anything() -> None:
    status = schema()["properties"]["status"]["default"]
    conditions = {one["type"]: one["status"] for one in status["conditions"]}
    assert conditions == {"Ready": "Unknown", "Reconciling": "True"}


def test_what_kubectl_shows_exists_in_the_schema() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    known = {f".{path}" for path, _ in nodes(schema())}
    shown = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    scale = version["subresources"]["scale"].values()
    plain = [path for path in [*shown, *scale] if "[" not in path and "metadata" not in path]
    assert len(plain) > 10
    assert [path for path in plain if path not in known] == []


def test_names_are_those_of_the_design() -> None:
    names = custom_resource_definition()["spec"]["names"]
    assert names["shortNames"] == ["ftj"]
    assert names["categories"] == ["all", "ai"]


def test_text_for_ftctl_alone_stays_out_of_the_crd() -> None:
    rules = [
        rule for _, node in nodes(schema()) for rule in node.get("x-kubernetes-validations", [])
    ]
    assert len(rules) > 40
    assert {key for rule in rules for key in rule} <= {
        "rule",
        "message",
        "messageExpression",
        "fieldPath",
    }


class Part(ApiModel):
    """A part. And more.

    Attributes that no CRD shows.
    """

    count: Annotated[int, Field(ge=1, le=9)] = Field(2, description="How many.")


class Whole(ApiModel):
    """One field of each construct in use."""

    part: Part = Field(Part(), description="A part.")
    parts: Annotated[list[Part], Field(max_length=3)] = Field([], description="Parts.")
    labels: Annotated[dict[str, Annotated[str, Field(max_length=5)]], Field(max_length=2)] = Field(
        {}, description="Labels."
    )
    size: Annotated[int, Field(ge=1, le=8)] | Literal["auto"] = Field("auto", description="Size.")
    name: Annotated[str, Field(pattern="^a"), Rule("self != 'ab'", "must not be ab")] | None = (
        Field(None, description="A name.")
    )
    needed: bool = Field(description="Needed.")

    cel_rules = (Rule("self.needed", "must be true", field="needed"),)


def test_converter_writes_each_construct_in_structural_form() -> None:
    count = {"description": "How many.", "type": "integer", "minimum": 1, "maximum": 9}
    count |= {"format": "int32", "default": 2}
    part = {"type": "object", "properties": {"count": count}}
    assert object_schema(Whole) == {
        "description": "One field of each construct in use.",
        "type": "object",
        "required": ["needed"],
        "properties": {
            "part": {"description": "A part.", **part, "default": {"count": 2}},
            "parts": {
                "description": "Parts.",
                "type": "array",
                "items": {"description": "A part. And more.", **part},
                "maxItems": 3,
            },
            "labels": {
                "description": "Labels.",
                "type": "object",
                "additionalProperties": {"type": "string", "maxLength": 5},
                "maxProperties": 2,
            },
            "size": {
                "description": "Size.",
                "x-kubernetes-int-or-string": True,
                "minimum": 1,
                "maximum": 8,
                "maxLength": 4,
                "default": "auto",
            },
            "name": {
                "description": "A name.",
                "type": "string",
                "pattern": "^a",
                "x-kubernetes-validations": [{"rule": "self != 'ab'", "message": "must not be ab"}],
            },
            "needed": {"description": "Needed.", "type": "boolean"},
        },
        "x-kubernetes-validations": [
            {"rule": "self.needed", "message": "must be true", "fieldPath": ".needed"}
        ],
    }


@pytest.mark.parametrize(
    "annotation",
    [
        pytest.param(Annotated[int, Field(gt=1)], id="exclusive bound"),
        pytest.param(Literal["a"], id="single word"),
        pytest.param(set[str], id="set"),
        pytest.param(tuple[str, int], id="tuple"),
        pytest.param(int | str, id="number or any text"),
        pytest.param(Any, id="anything"),
    ],
)
def test_converter_refuses_what_has_no_structural_form(annotation: Any) -> None:
    made = type("Made", (ApiModel,), {"__annotations__": {"x": annotation}, "__module__": __name__})
    with pytest.raises(TypeError, match=r"^Made\.x: "):
        object_schema(made)


def test_the_yaml_reads_back_as_the_object() -> None:
    for definition in (custom_resource_definition(), profile_definition()):
        assert yaml.safe_load(crd_yaml(definition)) == definition

"""A changed schema raises the revision that its CRD carries."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator import __version__
from finetune_operator.api.crd import custom_resource_definition, profile_definition
from finetune_operator.api.crd_revision import (
    REVISION_ANNOTATION,
    REVISIONS,
    revision,
    revision_of,
    schema_digest,
    unrecorded,
)

GOLDENS = Path(__file__).parents[2] / "goldens"
DEFINITIONS = [custom_resource_definition(), profile_definition()]
each_definition = pytest.mark.parametrize("definition", DEFINITIONS, ids=["job", "profile"])


def schema_of(definition: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


@each_definition
def test_the_schema_of_this_commit_has_the_last_revision(definition: dict[str, Any]) -> None:
    assert unrecorded(definition) is None


@each_definition
def test_a_definition_carries_its_revision_and_its_version(definition: dict[str, Any]) -> None:
    name = definition["metadata"]["name"]

    assert revision_of(definition) == revision(name) == len(REVISIONS[name])
    assert definition["metadata"]["labels"] == {
        "app.kubernetes.io/part-of": "finetune-operator",
        "app.kubernetes.io/version": __version__,
    }


@each_definition
def test_a_changed_schema_asks_for_the_line_that_raises_its_revision(
    definition: dict[str, Any],
) -> None:
    changed = copy.deepcopy(definition)
    schema_of(changed)["properties"]["spec"]["properties"]["novelty"] = {"type": "string"}

    said = unrecorded(changed) or ""

    assert definition["metadata"]["name"] in said
    assert re.findall('append "([0-9a-f]{16})"', said) == [schema_digest(changed)]


def test_texts_and_columns_leave_the_revision_as_it_is() -> None:
    changed = copy.deepcopy(custom_resource_definition())
    schema_of(changed)["properties"]["spec"]["description"] = "Said in other words."
    changed["spec"]["versions"][0]["additionalPrinterColumns"].pop()

    assert unrecorded(changed) is None


@pytest.mark.parametrize("name", ["description", "title"])
def test_a_field_may_be_called_like_a_text(name: str) -> None:
    changed = copy.deepcopy(custom_resource_definition())
    schema_of(changed)["properties"]["spec"]["properties"][name] = {"type": "string"}

    assert unrecorded(changed) is not None


@pytest.mark.parametrize(
    ("annotations", "found"),
    [
        pytest.param({REVISION_ANNOTATION: "7"}, 7, id="a number"),
        pytest.param({REVISION_ANNOTATION: "new"}, 0, id="no number"),
        pytest.param({}, 0, id="no annotation of ours"),
        pytest.param(None, 0, id="no annotations"),
    ],
)
def test_the_revision_of_a_cluster_is_read_from_its_annotation(
    annotations: dict[str, str] | None, found: int
) -> None:
    assert revision_of({"metadata": {"name": "x", "annotations": annotations}}) == found


def defaults_of(schema: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return every default of a schema by its field's path."""
    found = {path: schema["default"]} if "default" in schema else {}
    for name, below in schema.get("properties", {}).items():
        found |= defaults_of(below, f"{path}.{name}")
    return found


def test_no_field_that_came_later_has_a_default_in_the_schema() -> None:
    """The API server would read it into stored jobs, and an older operator would refuse them."""
    known = yaml.safe_load((GOLDENS / "crd_defaults.yaml").read_text())

    assert {one["metadata"]["name"]: defaults_of(schema_of(one)) for one in DEFINITIONS} == known

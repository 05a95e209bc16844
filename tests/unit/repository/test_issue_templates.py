"""Templates of issues: fields that GitHub requires, and the output of `ftctl doctor`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[3] / ".github" / "ISSUE_TEMPLATE"
KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def form(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return read


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_a_form_has_the_fields_that_github_requires(name: str) -> None:
    read = form(name)

    assert read["name"]
    assert read["description"]
    assert {one["type"] for one in read["body"]} <= KINDS
    fields = [one for one in read["body"] if one["type"] != "markdown"]
    assert len({one["id"] for one in fields}) == len(fields)
    assert all(one["attributes"]["label"] for one in fields)
    assert any(one.get("validations", {}).get("required") for one in fields)


def test_a_report_of_a_fault_requires_the_output_of_doctor() -> None:
    (doctor,) = (one for one in form("bug.yml")["body"] if one.get("id") == "doctor")

    assert "ftctl doctor --cluster" in doctor["attributes"]["description"]
    assert doctor["validations"]["required"]

"""Published figures are those that were measured, missed limits included."""

import json
from collections.abc import Callable
from typing import Any

import azureml_load
import gpu_page
import metrics_cost
import pytest
import times_by_file
from measured import FOLDER
from operator_page import LIMITS, page


def measured() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((FOLDER / "operator.json").read_text(encoding="utf-8"))
    return made


def row(text: str, name: str) -> list[str]:
    (line,) = (one for one in text.splitlines() if one.startswith(f"| `{name}` |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("operator", page),
        ("azureml", azureml_load.page),
        ("metrics", metrics_cost.page),
        ("gpu", gpu_page.page),
        ("tests", times_by_file.page),
    ],
)
def test_a_published_page_is_what_its_json_makes(
    name: str, render: Callable[[dict[str, Any]], str]
) -> None:
    made = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert (FOLDER / f"{name}.md").read_text(encoding="utf-8") == render(made)


@pytest.mark.parametrize("name", LIMITS)
def test_a_figure_beyond_its_limit_is_told_as_missed(name: str) -> None:
    most = LIMITS[name].most
    kept, broken = measured(), measured()
    kept[name] = {"median": most, "min": most, "max": most}
    broken[name] = {"median": most + 0.01, "min": 0.0, "max": most + 0.01}
    assert row(page(kept), name)[4:6] == [f"{LIMITS[name].judged} ≤ {most:g}", "met"]
    assert row(page(broken), name)[5] == "**missed**"

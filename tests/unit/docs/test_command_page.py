"""The pages of ftctl and of the chart's values: every option and value, with its default."""

import html
import re
from pathlib import Path

import pytest
from typer.main import get_command

from finetune_operator.cli.app import COMMANDS, LazyGroup, app
from values_table import described

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs/reference"


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of each row by each name in code in its first cell."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: cells for cells in lines for name in re.findall(r"`([^`]+)`", cells[0])}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_on_the_page(name: str) -> None:
    group = get_command(app)
    assert isinstance(group, LazyGroup)
    context = group.make_context("ftctl", [], resilient_parsing=True)
    _, command, _ = group.resolve_command(context, [name])
    page = (FOLDER / "ftctl.md").read_text(encoding="utf-8")
    section = page.partition(f"## ftctl {name}\n")[2].partition("\n## ")[0]
    shown = rows(section)
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    assert shown.keys() == {word for one in options for word in one.opts}
    for one in options:
        _, default, text = shown[one.opts[0]]
        assert html.unescape(text).startswith(one.help)
        if one.required:
            assert default == "required"
        elif one.default not in (None, False, "", []):
            assert default == f"`{one.default}`"
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = section.partition("```text\n")[2].partition("\n")[0]
    assert usage.count(" ") == 2 + len(arguments)
    for paragraph in command.help.split("\n\n"):
        assert " ".join(paragraph.split()) in html.unescape(section)


def test_every_value_of_the_chart_is_on_the_page_and_in_the_readme() -> None:
    values = described((ROOT / "charts/finetune-operator/values.yaml").read_text(encoding="utf-8"))
    assert len(values) > 60
    for file in (FOLDER / "values.md", ROOT / "charts/finetune-operator/README.md"):
        shown = rows(file.read_text(encoding="utf-8"))
        assert [one.path for one in values if one.path not in shown] == []
        assert all(shown[one.path][2] == one.text.replace("|", r"\|") for one in values)

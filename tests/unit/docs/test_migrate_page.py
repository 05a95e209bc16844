"""docs/how-to/migrate.md maps the keys of other tools as `ftctl validate` does."""

import re
from pathlib import Path

import pytest

from finetune_operator.api.other_tools_table import TABLE

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "migrate.md").read_text(encoding="utf-8")
FIELDS = {
    key: {field.removeprefix("spec.").replace("[]", "") for field in entry.fields}
    for entry in TABLE
    for key in entry.keys
}


def rows(section: str) -> list[tuple[list[str], str]]:
    """Return the keys and the text of each row of the table below a heading."""
    body = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = (line.strip("|").split("|", 1) for line in body.splitlines() if "`" in line)
    return [(re.findall(r"`(\w+)`", keys), text) for keys, text in cells]


@pytest.mark.parametrize(
    ("keys", "text"), [pytest.param(*row, id=row[0][0]) for row in rows("Field names")]
)
def test_a_row_names_the_fields_of_its_keys(keys: list[str], text: str) -> None:
    shown = set(re.findall(r"`([a-z]\w+\.[\w.]+)`", text))
    for key in keys:
        parents = {field.rpartition(".")[0] for field in FIELDS[key]}
        assert (FIELDS[key] | parents) & shown, key


@pytest.mark.parametrize(
    "keys", [pytest.param(keys, id=keys[0]) for keys, _ in rows("Keys without a field")]
)
def test_a_key_without_a_field_has_none(keys: list[str]) -> None:
    assert [FIELDS[key] for key in keys] == [set()] * len(keys)


def test_the_page_has_the_tables() -> None:
    assert len(rows("Field names")) > 30
    assert len(rows("Keys without a field")) >= 10

"""The table of values in the chart's README has every value, from its comment."""

import pytest

from values_table import UndescribedValueError, table

VALUES = """\
# Of the file as a whole.

## First
## With a word before
## it all.
image:
  # -- Where it is,
  # or was.
  name: ""
  tags: # -- no description, as it is behind
    # -- One | of two.
    one: [a, {b: 1}]

## Second
# -- All below it.
labels: {deep: {er: 2}}
# -- True or false.
flag: true
"""


def test_table_has_each_value_with_default_and_comment_by_section() -> None:
    assert table(VALUES).splitlines() == [
        "### First",
        "",
        "With a word before",
        "it all.",
        "",
        "| value | default | what it is |",
        "|---|---|---|",
        '| `image.name` | `""` | Where it is, or was. |',
        '| `image.tags.one` | `["a", {"b": 1}]` | One \\| of two. |',
        "",
        "### Second",
        "",
        "| value | default | what it is |",
        "|---|---|---|",
        '| `labels` | `{"deep": {"er": 2}}` | All below it. |',
        "| `flag` | `true` | True or false. |",
    ]


def test_long_default_is_cut() -> None:
    words = [f"word {number}" for number in range(99)]

    row = table(f"## All\n# -- Long.\nwords: {words}").splitlines()[-1]

    assert row.endswith(" …` | Long. |")
    assert len(row) < 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("## A\nflag: true", r"values.yaml:2: flag has no description", id="none"),
        pytest.param("## A\n# Only so.\nx: 1", "x has no description", id="a comment that is none"),
        pytest.param("## A\na:\n  b: {}", r"values.yaml:3: a.b has no", id="an empty map below"),
        pytest.param("## A\n- 1", "is no mapping", id="a list"),
    ],
)
def test_value_without_a_description_is_an_error(text: str, said: str) -> None:
    with pytest.raises(UndescribedValueError, match=said):
        table(text)

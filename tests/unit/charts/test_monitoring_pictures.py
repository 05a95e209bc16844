"""Pictures of dashboards: every panel is drawn, and those of the docs have all of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from monitoring.draw import draw
from monitoring.generate import FILES
from monitoring.plots import Points, show
from support.charts.pictures import FOLDER, PICTURES

BOARDS = sorted((FILES / "dashboards").glob("*.json"))


def read(file: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(file.read_text())
    return made


def texts(svg: str) -> list[str]:
    return [
        one.text or "" for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("text")
    ]


def rows_of(board: dict[str, Any]) -> list[str]:
    return [one["title"] for one in board["panels"] if one["type"] == "row"]


def titles_of(board: dict[str, Any]) -> list[str]:
    """Return the titles of rows and panels, including panels inside collapsed rows."""
    found = [one for row in board["panels"] for one in (row, *row.get("panels", ()))]
    return [one["title"] for one in found]


def answer(expr: str) -> list[tuple[Mapping[str, str], Points]]:
    """Return two series, whatever is asked; with a gap, as after a restart."""
    return [
        ({"rank": str(rank), "le": le}, [(10, 1.0 + rank), (11, float("nan")), (12, 2.0 + rank)])
        for rank, le in enumerate(("0.5", "+Inf"))
    ]


@pytest.mark.parametrize("file", BOARDS, ids=lambda one: one.stem)
def test_every_panel_is_drawn_with_its_title(file: Path) -> None:
    board = read(file)

    drawn = texts(draw(board, rows_of(board), answer))

    assert [title for title in titles_of(board) if title not in drawn] == []
    assert "No data" not in drawn


def test_a_panel_without_an_answer_says_so() -> None:
    board = read(BOARDS[0])

    drawn = texts(draw(board, rows_of(board)[:1], lambda expr: []))

    assert "No data" in drawn


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_the_docs_has_the_panels_of_the_dashboard(name: str) -> None:
    rows = PICTURES[name].rows
    board = read(FILES / "dashboards" / "job.json")
    drawn = texts(draw(board, rows, answer))
    titles = [title for title in titles_of(board) if title in drawn]

    shown = texts((FOLDER / f"{name}.svg").read_text())

    assert [one for one in titles if one not in shown] == []


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.125, "percentunit", "12.5 %"),
        (0.0421, "s", "42.1 ms"),
        (90.0, "s", "90 s"),
        (5400.0, "s", "90 min"),
        (7200.0, "s", "2 h"),
        (1234.0, "none", "1.23 k"),
        (0.25, "none", "0.25"),
        (0.00001, "sci", "1e-05"),
        (2.5e9, "Bps", "2.5 GB/s"),
        (0.0, "bytes", "0"),
    ],
)
def test_a_value_is_shown_with_its_unit(value: float, unit: str, text: str) -> None:
    assert show(value, unit) == text

"""The picture of README.md: a terminal's output becomes rows, and rows become an SVG."""

import io
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from support.docs.recording import PICTURE, Output, picture, record
from support.docs.screen_drawing import Moment, draw
from support.docs.terminal_screen import Run, Screen, Style

SVG = "{http://www.w3.org/2000/svg}"


def console() -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=40, height=10, legacy_windows=False
    )


def written(by: Console) -> str:
    assert isinstance(by.file, io.StringIO)
    return by.file.getvalue().replace("\n", "\r\n")  # as a terminal's own settings do


def test_a_live_view_that_grows_and_shrinks_ends_as_it_should_look() -> None:
    shown = console()
    with Live(console=shown, auto_refresh=False, transient=True) as live:
        for lines in (3, 5, 1):
            live.update(Text("\n".join("x" * 20 for _ in range(lines))), refresh=True)
            shown.print(f"{lines} lines", highlight=False)
    screen = Screen(40, 10)

    screen.feed(written(shown))

    assert screen.text() == "3 lines\n5 lines\n1 lines"


@pytest.mark.parametrize("size", [1, 2, 7])
def test_output_may_come_in_pieces_of_any_size(size: int) -> None:
    shown = console()
    table = Table.grid(expand=True)
    table.add_row("[bold]name[/] [green]Training[/]", "[dim]12s[/]")
    shown.print(table)
    whole, cut = Screen(40, 10), Screen(40, 10)
    text = written(shown)

    whole.feed(text)
    for at in range(0, len(text), size):
        cut.feed(text[at : at + size])

    assert cut.rows() == whole.rows()


def test_a_row_is_divided_where_its_looks_change() -> None:
    screen = Screen(20, 2)

    screen.feed("\x1b[1mloss\x1b[0m \x1b[2;32m1.5\x1b[0m\r\n")

    assert screen.rows()[0] == (
        Run(0, "loss", Style(is_bold=True)),
        Run(5, "1.5", Style("green", is_dim=True)),
    )


@pytest.mark.parametrize(
    ("code", "color"),
    [
        ("92", "bright green"),
        ("38;5;12", "bright blue"),
        ("38;5;208", "#ff8700"),
        ("38;5;237", "#3a3a3a"),
    ],
)
def test_each_color_of_a_terminal_is_known(code: str, color: str) -> None:
    screen = Screen(5, 1)

    screen.feed(f"\x1b[1;{code}mx\x1b[39m")

    assert screen.rows()[0][0].style == Style(color, is_bold=True)


def test_what_is_below_the_screen_scrolls() -> None:
    screen = Screen(5, 2)

    screen.feed("1\r\n2\r\n3")

    assert screen.text() == "2\n3"


@pytest.mark.parametrize("output", ["\x1b[5H", "\x1b[48;5;1m", "\b"])
def test_what_a_picture_cannot_show_is_an_error(output: str) -> None:
    with pytest.raises(ValueError, match="not known here"):
        Screen(5, 2).feed(output)


def test_a_program_is_recorded_in_a_terminal_with_its_exit_code(tmp_path: Path) -> None:
    program = "import sys; print(sys.stdout.isatty(), '→'); sys.exit(3)"

    said, code = record([sys.executable, "-c", program], str(tmp_path))

    assert "".join(one.text for one in said) == "True →\r\n"
    assert code == 3


def test_each_row_is_shown_for_as_long_as_it_was() -> None:
    first, second = Screen(9, 2), Screen(9, 2)
    first.feed("same\r\nold")
    second.feed("same\r\nnew")

    drawn = ElementTree.fromstring(
        draw([Moment(0, first.rows()), Moment(4, second.rows())], 10, "a run", 9)
    )

    groups = {"".join(group.itertext()): group for group in drawn.iter(f"{SVG}g")}
    assert groups["same"].find(f"{SVG}animate") is None
    for text, values, times in (
        ("old", "visible;hidden", "0;0.4"),
        ("new", "hidden;visible", "0;0.4"),
    ):
        played = groups[text].find(f"{SVG}animate")
        assert played is not None
        assert (played.get("values"), played.get("keyTimes")) == (values, times)
    assert groups["old"].get("visibility") == "hidden"
    assert groups["new"].get("visibility") is None


def test_of_what_changes_faster_than_eyes_follow_some_moments_are_shown() -> None:
    said = [Output(float(second), f"{second}\r\n") for second in range(3000)]

    moments = set(re.findall(r'keyTimes="0;([\d.]+)', picture(said)))

    assert 20 < len(moments) < 100


def test_the_picture_of_the_readme_is_of_a_run_that_completed() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    words = " ".join(
        "".join(group.itertext()) for group in ElementTree.fromstring(text).iter(f"{SVG}g")
    )

    assert "Training" in words
    assert "Complete after" in words
    assert len(text) < 150_000

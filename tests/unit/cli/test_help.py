"""The help of every command at any width of the terminal."""

from importlib import import_module
from inspect import getdoc
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from finetune_operator.cli.app import COMMANDS, app

WIDTHS = (40, 80, 200)


def shown(words: list[str], width: int) -> list[str]:
    """Return the lines after the usage."""
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(width)})
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    return lines[lines.index("") :]


def paragraphs(lines: list[str]) -> list[list[str]]:
    """Return the lines of each paragraph of the description, which is indented by two spaces."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("  ") and line.strip():
            found[-1].append(line)
        elif not line:
            found.append([])
        elif line.endswith(":"):  # arguments or options
            break
    return [one for one in found if one]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_no_line_of_the_help_is_longer_than_the_terminal_or_cut(
    words: list[str], width: int
) -> None:
    lines = shown(words, width)
    assert max(map(len, lines)) <= width
    texts = [line for line in lines if not line.lstrip().startswith("-")]  # not names of options
    assert not [line for line in texts if line.endswith(("…", "..."))]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_paragraphs_of_the_help_are_filled_to_the_width(name: str, width: int) -> None:
    written = getdoc(getattr(import_module(f"finetune_operator.cli.{name}"), name)) or ""
    found = paragraphs(shown([name], width))
    assert [" ".join(" ".join(one).split()) for one in found] == [
        " ".join(one.split()) for one in written.split("\n\n")
    ]
    widest = min(width, 100)
    for lines in found:
        for line, following in pairwise(lines):
            assert len(line) + 1 + len(following.split()[0]) > widest, line


def test_the_list_of_commands_has_their_whole_summaries() -> None:
    text = " ".join(" ".join(shown([], 40)).split())
    for name, summary in COMMANDS.items():
        assert f"{name} {summary}" in text

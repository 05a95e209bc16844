"""The table of a chart's values for its README, from the comments of values.yaml.

A comment `# -- text` above a name describes the value and all values below it. A comment that
begins with `## ` opens a section. Every value is described itself, by
a value above it, or by all values below it.
"""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

_LONGEST_DEFAULT = 160


class UndescribedValueError(ValueError):
    """A value has no comment that describes it."""


@dataclass(frozen=True)
class Described:
    """A value.

    Attributes:
        path: Its name with the names above it, such as `image.tag`.
        default: As JSON.
        text: Description.
        line: Line of its name in values.yaml, from 0.
    """

    path: str
    default: str
    text: str
    line: int


def table(text: str) -> str:
    """Return a Markdown table for each section of a values.yaml.

    Raises:
        UndescribedValueError: a value has no description.
    """
    lines = text.splitlines()
    values = described(text)
    sections = [number for number, line in enumerate(lines) if _opens_section(lines, number)]
    parts = []
    for start, end in zip(sections, [*sections[1:], len(lines)], strict=True):
        rows = [_row(one) for one in values if start < one.line < end]
        parts += [
            *_heading(lines, start),
            "| value | default | what it is |",
            "|---|---|---|",
            *rows,
            "",
        ]
    return "\n".join(parts)


def described(text: str) -> list[Described]:
    """Return every value of a values.yaml, in its order.

    Raises:
        UndescribedValueError: a value has no description.
    """
    return list(_values(yaml.compose(text), text.splitlines()))


def _values(node: yaml.Node | None, lines: list[str], above: str = "") -> Iterator[Described]:
    """Yield the values of a mapping, in the order of the file."""
    if not isinstance(node, yaml.MappingNode):
        raise UndescribedValueError(f"values.yaml: {above or 'the whole'} is no mapping")
    for name, below in node.value:
        path, line = f"{above}{name.value}", name.start_mark.line
        said = _description(lines, line)
        if said:
            default = yaml.safe_load(yaml.serialize(below))
            yield Described(path, json.dumps(default, ensure_ascii=False), said, line)
        elif isinstance(below, yaml.MappingNode) and below.value:
            yield from _values(below, lines, f"{path}.")
        else:
            raise UndescribedValueError(
                f"values.yaml:{line + 1}: {path} has no description; write one above it: # -- …"
            )


def _description(lines: list[str], line: int) -> str:
    """Return the text after `--` in the comment directly above a line; empty without one."""
    comment: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("# "):
        line -= 1
        comment.insert(0, lines[line].strip().removeprefix("# "))
    if not comment or not comment[0].startswith("-- "):
        return ""
    return " ".join(comment).removeprefix("-- ")


def _opens_section(lines: list[str], number: int) -> bool:
    return lines[number].startswith("## ") and not lines[number - 1].startswith("##")


def _heading(lines: list[str], start: int) -> list[str]:
    end = next(at for at in range(start, len(lines)) if not lines[at].startswith("##"))
    title, *text = (line.removeprefix("##").removeprefix(" ") for line in lines[start:end])
    return [f"### {title}", "", *([*text, ""] if text else [])]


def _row(one: Described) -> str:
    default = textwrap.shorten(one.default, _LONGEST_DEFAULT, placeholder=" …")
    text = one.text.replace("|", r"\|")
    return f"| `{one.path}` | `{default}` | {text} |"

"""Markdown pages of the repository: their prose without code, links, anchors and code blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`]+`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_NAMED = re.compile(r'<a (?:id|name)="([^"]+)">')


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Page and first line, in the notation of editors."""
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return the paths of all pages that users and contributors read."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    found += [*ROOT.glob("charts/*/README.md"), *ROOT.glob("examples/*/README.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return the code blocks of a page; the line is the first of the code."""
    text = read(page)
    return [
        Block(page, text.count("\n", 0, found.start()) + 2, found[2], found[3])
        for found in _FENCE.finditer(text)
    ]


def without_blocks(text: str) -> str:
    """Return a text with empty lines instead of code blocks."""
    return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


def links(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of each link to another place of the repository."""
    for number, line in enumerate(without_blocks(read(page)).split("\n"), 1):
        for target in _LINK.findall(_CODE.sub("``", line)):
            if "://" not in target and not target.startswith("mailto:"):
                yield number, target


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    text = without_blocks(read(page))
    found: list[str] = []
    for heading in _HEADING.findall(text):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one) is not None for one in found)
        found.append(f"{slug}-{repeated}" if slug in found else slug)
    return {*found, *_NAMED.findall(text)}

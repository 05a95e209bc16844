"""The manifests with one flaw each; two tests refuse them, one offline and one on an API server."""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "manifests" / "bad"


@dataclass(frozen=True)
class BadManifest:
    """One file; its first lines say what is wrong.

    Attributes:
        path: Field the message is about; empty for the whole document.
        says: Part of the sentence `ftctl validate` prints.
        line: Line it prints.
    """

    file: Path
    path: str
    says: str
    line: int


def bad_manifests() -> list[BadManifest]:
    """Return all of them, by name."""
    found = []
    for file in sorted(FOLDER.glob("*.yaml")):
        _, path, says, line = (text.partition(":")[2].strip() for text in _head(file))
        found.append(BadManifest(file, path, says, int(line)))
    return found


def _head(file: Path) -> list[str]:
    lines = file.read_text().splitlines()[:4]
    for line, word in zip(lines, ("# flaw:", "# path:", "# says:", "# line:"), strict=True):
        assert line.startswith(word), f"{file} opens with # flaw:, # path:, # says:, # line:"
    return lines

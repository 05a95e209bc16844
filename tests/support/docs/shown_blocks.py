"""What a page shows: commands, and the output below each, in which … stands for anything."""

import re
from dataclasses import dataclass
from pathlib import Path

ANYTHING = r"[\s\S]*"
_BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """Commands that are run at once, and the output shown below them."""

    command: str
    output: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether the output shown is that of an API server that refuses it."""
        return " is invalid: " in self.output

    def matches(self, output: str) -> bool:
        """Say whether an output is the one that is shown, whatever blanks divide its words."""
        words = (re.escape(word).replace("…", ANYTHING) for word in self.output.split())
        pattern = r"\s+".join(words).replace(rf"{ANYTHING}\s+", ANYTHING)
        pattern = pattern.replace(rf"\s+{ANYTHING}", ANYTHING)
        return re.fullmatch(pattern, output.strip()) is not None


def shown_in(page: Path) -> list[Shown]:
    """Return all that a page shows, in its order.

    A block `sh` is run as a whole; each `$` of a block `console` begins another command.
    """
    found = []
    for language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "sh":
            found.append(Shown(text))
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append(Shown(command, output.strip()))
    return found

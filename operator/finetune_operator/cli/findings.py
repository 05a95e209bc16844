"""What `ftctl doctor` finds."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What was found."""

    OK = "ok"
    ABSENT = "absent"  # and not needed
    MISSING = "missing"  # and needed


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: Heading it is printed under.
        detail: Version, size or reason.
        requirement: What pip installs to get it; empty when there is nothing to install.
    """

    topic: str
    name: str
    state: State
    detail: str = ""
    requirement: str = ""

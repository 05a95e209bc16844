"""What `ftctl doctor` finds, here and in a cluster."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What was found."""

    OK = "ok"
    ABSENT = "absent"  # and not needed
    MISSING = "missing"  # and needed
    UNKNOWN = "unknown"  # as it could not be asked


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: Heading it is printed under.
        detail: Version, size or reason.
        requirement: What pip installs to get it; empty when there is nothing to install.
        remedy: Command that mends it, where that is not pip; empty for none.
    """

    topic: str
    name: str
    state: State
    detail: str = ""
    requirement: str = ""
    remedy: str = ""

"""Findings of `ftctl doctor`, on this machine and in a cluster."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Result of a check."""

    OK = "ok"
    ABSENT = "absent"  # and optional
    MISSING = "missing"  # and required
    UNKNOWN = "unknown"  # the check could not be run


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        topic: Heading of the line.
        detail: Version, size or reason.
        requirement: Requirement for pip; empty if no package is missing.
        remedy: Command that fixes the fault, unless pip does; empty for none.
    """

    topic: str
    name: str
    state: State
    detail: str = ""
    requirement: str = ""
    remedy: str = ""

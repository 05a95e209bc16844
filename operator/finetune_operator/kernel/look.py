"""What came of one look at a job; `Reconciler` says it, the queue acts by it."""

from dataclasses import dataclass

_SHORTEST_WAIT_SECONDS = 0.1  # whatever a backend asks for


@dataclass(frozen=True)
class Look:
    """What came of one look at a job.

    Attributes:
        again_in_seconds: When to look again though nothing happens; None for never.
        when_quiet: Look again before that if no other job is to be looked at.
    """

    again_in_seconds: float | None = None
    when_quiet: bool = False


NEVER = Look()
AT_ONCE = Look(0.0)


def look_in(seconds: float | None, *, when_quiet: bool = False) -> Look:
    """Return that the job is to be looked at in so long, but not at once."""
    return NEVER if seconds is None else Look(max(seconds, _SHORTEST_WAIT_SECONDS), when_quiet)

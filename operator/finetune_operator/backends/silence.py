"""Record since when a service does not respond, by scope. For one event loop."""

import asyncio
from collections.abc import Container
from dataclasses import dataclass


@dataclass
class _Silence:
    since: float
    error: str
    is_reported: bool = False


class Silences:
    """Scopes without a response, such as a workspace; callers choose them.

    Args:
        patience: Seconds of silence after which it is reported.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._places: dict[str, _Silence] = {}

    def note(self, place: str, error: str, lasts: float = 0.0) -> str | None:
        """Record a missing or failed response.

        Args:
            place: The silent scope.
            error: The failure.
            lasts: Further seconds in which no response can come.

        Returns:
            The first error of a silence that is to be reported; None before that.
        """
        now = asyncio.get_running_loop().time()
        silence = self._places.setdefault(place, _Silence(now, error))
        if now + lasts - silence.since < self._patience:
            return None
        silence.is_reported = True
        return silence.error

    def end(self, place: str) -> bool:
        """Record a response, and return whether the silence before it was reported."""
        silence = self._places.pop(place, None)
        return silence is not None and silence.is_reported

    def keep(self, places: Container[str]) -> None:
        """Drop all other scopes, because no more requests are sent to them."""
        self._places = {place: one for place, one in self._places.items() if place in places}

"""Since when a service does not answer, in each of its places. Of one event loop."""

import asyncio
from collections.abc import Container
from dataclasses import dataclass


@dataclass
class _Silence:
    since: float
    error: str
    is_told: bool = False


class Silences:
    """Places that do not answer; their names are the caller's.

    Args:
        patience: After how many seconds of silence it is told.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._places: dict[str, _Silence] = {}

    def note(self, place: str, error: str, lasts: float = 0.0) -> str | None:
        """Take note that there is no good answer.

        Args:
            place: That does not answer.
            error: Why.
            lasts: For how many seconds more it is known that there will be none.

        Returns:
            The first error of a silence that is to be told; None before that.
        """
        now = asyncio.get_running_loop().time()
        silence = self._places.setdefault(place, _Silence(now, error))
        if now + lasts - silence.since < self._patience:
            return None
        silence.is_told = True
        return silence.error

    def end(self, place: str) -> bool:
        """Take note of an answer, and return whether the silence before it was to be told."""
        silence = self._places.pop(place, None)
        return silence is not None and silence.is_told

    def keep(self, places: Container[str]) -> None:
        """Forget all other places, as nobody asks there any more."""
        self._places = {place: one for place, one in self._places.items() if place in places}

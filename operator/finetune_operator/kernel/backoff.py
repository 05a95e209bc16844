"""Exponential backoff with jitter and without a maximum number of retries."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Doubles from `first_seconds` to `max_seconds`; each wait is 50 to 100 % of that.

    Iterating yields waits indefinitely, the form in which kopf accepts them.

    Attributes:
        chance: Returns a number from 0 to 1.
    """

    first_seconds: float
    max_seconds: float
    chance: Callable[[], float] = random.random

    def seconds(self, failures: int) -> float:
        """Return the wait after that many consecutive failures, counted from 1."""
        doublings = min(max(failures, 1) - 1, 32)
        full: float = min(self.first_seconds * 2.0**doublings, self.max_seconds)
        return full * (0.5 + 0.5 * self.chance())

    def __iter__(self) -> Iterator[float]:
        """Yield the wait after the first failure, after the second, and so on."""
        failures = 0
        while True:
            failures += 1
            yield self.seconds(failures)

"""Since when something fails for a job: what may pass by itself is not reported at once."""

from collections.abc import Callable
from datetime import datetime, timedelta

from finetune_operator.kube.cache import Key
from finetune_operator.reconcile.decide import PATIENCE_SECONDS


class Failing:
    """Failures in a row, by job.

    Args:
        now: The time, with a zone.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._since: dict[Key, tuple[datetime, int]] = {}

    def note(self, key: Key) -> int:
        """Note a failure; return how many there were after the first `PATIENCE_SECONDS`."""
        since, tries = self._since.get(key, (self._now(), 0))
        tries += self._now() - since >= timedelta(seconds=PATIENCE_SECONDS)
        self._since[key] = (since, tries)
        return tries

    def forget(self, key: Key) -> None:
        """Note a success, or that the job is over."""
        self._since.pop(key, None)

"""When a checkpoint is due: every so many steps or seconds, or as often as saves are worth it.

The store asks. Without `everySteps` and `everySeconds` the interval is the one that loses least
time to saves and to failures together: sqrt(2 C M) (Young, 10.1145/361147.361115; Daly,
10.1016/j.future.2004.11.016), with the measured cost C of a save and the mean time between
failures M.
"""

import math

from finetune_trainer.config import CheckpointConfig

# Nobody knows C before the first save: it is made early, to measure it.
FIRST_SAVE_SHARE = 1 / 1000  # of the mean time between failures


def young_daly_seconds(save_seconds: float, mean_time_between_failures: float) -> float:
    """Return the interval between saves; never less than a save takes, so that none overlap."""
    return max(save_seconds, math.sqrt(2 * save_seconds * mean_time_between_failures))


class Cadence:
    """Counts the time since the last save began.

    Attributes:
        save_seconds: What the newest save took, from its begin to its commit; None before one.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self.save_seconds: float | None = None
        self._config = config
        self._counted_from: float | None = None

    def is_due(self, step: int) -> bool:
        """Whether `checkpoint.everySteps` asks for a save at `step`; the same on every rank."""
        every = self._config.every_steps
        return every is not None and step > 0 and step % every == 0

    def is_over(self, now: float) -> bool:
        """Whether the interval has passed; true once, then the count starts anew.

        `now` is in seconds of any clock.
        """
        interval = self.interval_seconds
        if interval is None:
            return False
        if self._counted_from is None:
            self._counted_from = now
        is_over = now - self._counted_from >= interval
        if is_over:
            self._counted_from = now
        return is_over

    def restart(self) -> None:
        """Count from the next question on, as a save begins now."""
        self._counted_from = None

    @property
    def interval_seconds(self) -> float | None:
        """Seconds between saves by time; None where steps alone decide."""
        config = self._config
        if config.every_steps is not None or config.every_seconds is not None:
            return config.every_seconds
        if self.save_seconds is None:
            return config.mean_time_between_failures * FIRST_SAVE_SHARE
        return young_daly_seconds(self.save_seconds, config.mean_time_between_failures)

"""Decide when a checkpoint is due: by steps, by seconds, or by the cost of saves and failures.

The store calls it. Without `everySteps` and `everySeconds` the interval minimises the time lost to
saves and failures together: sqrt(2 C M) (Young, 10.1145/361147.361115; Daly,
10.1016/j.future.2004.11.016), with the measured cost C of a save and the mean time between
failures M.
"""

import math

from finetune_trainer.config import CheckpointConfig

# Time of the first save, which is early because it measures C.
FIRST_SAVE_SHARE = 1 / 1000  # of the mean time between failures


def young_daly_seconds(save_seconds: float, mean_time_between_failures: float) -> float:
    """Return the interval between saves, at least the duration of a save so that none overlap."""
    return max(save_seconds, math.sqrt(2 * save_seconds * mean_time_between_failures))


class Cadence:
    """Counts the time since the last save began.

    Attributes:
        save_seconds: Duration of the newest save until its commit; None before the first.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self.save_seconds: float | None = None
        self._config = config
        self._counted_from: float | None = None

    def is_due(self, step: int) -> bool:
        """Whether `checkpoint.everySteps` requires a save at `step`; the same on every rank."""
        every = self._config.every_steps
        return every is not None and step > 0 and step % every == 0

    def is_elapsed(self, now: float) -> bool:
        """Whether the interval has passed; if so, a new interval starts.

        `now` is in seconds of any clock.
        """
        interval = self.interval_seconds
        if interval is None:
            return False
        if self._counted_from is None:
            self._counted_from = now
        is_elapsed = now - self._counted_from >= interval
        if is_elapsed:
            self._counted_from = now
        return is_elapsed

    def restart(self) -> None:
        """Start the next interval at the next check, because a save begins now."""
        self._counted_from = None

    @property
    def interval_seconds(self) -> float | None:
        """Seconds between saves; None if only `everySteps` decides."""
        config = self._config
        if config.every_steps is not None or config.every_seconds is not None:
            return config.every_seconds
        if self.save_seconds is None:
            return config.mean_time_between_failures * FIRST_SAVE_SHARE
        return young_daly_seconds(self.save_seconds, config.mean_time_between_failures)

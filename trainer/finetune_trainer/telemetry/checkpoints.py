"""Metrics of checkpoint costs, recorded by the checkpoint store and shown on rank 0's node page."""

from finetune_trainer.config import metrics
from finetune_trainer.telemetry.slots import Block


class CheckpointCosts:
    """Checkpoint series of one rank; for its main thread only."""

    def __init__(self, block: Block) -> None:
        """Look up the slot of every series."""
        self._blocking = block.histogram(metrics.CHECKPOINT_DURATION, "save_blocking")
        self._async = block.histogram(metrics.CHECKPOINT_DURATION, "save_async")
        self._load = block.histogram(metrics.CHECKPOINT_DURATION, "load")
        self._bytes = block.slot(metrics.CHECKPOINT_BYTES)
        self._failures = block.slot(metrics.CHECKPOINT_FAILURES)
        self._interval = block.slot(metrics.CHECKPOINT_INTERVAL)

    def blocked(self, seconds: float, interval_seconds: float | None) -> None:
        """Count a save that blocked training for `seconds`, and publish the time-based interval."""
        self._blocking.observe(seconds)
        self._due_every(interval_seconds)

    def committed(self, seconds: float, size_bytes: int, interval_seconds: float | None) -> None:
        """Count a save that was committed `seconds` after training resumed.

        If the interval is derived from the duration of saves, this call changes it.
        """
        self._async.observe(seconds)
        self._bytes.add(size_bytes)
        self._due_every(interval_seconds)

    def failed(self) -> None:
        """Count a save that was not committed."""
        self._failures.add(1)

    def loaded(self, seconds: float) -> None:
        """Count a checkpoint that was loaded."""
        self._load.observe(seconds)

    def _due_every(self, interval_seconds: float | None) -> None:
        if interval_seconds is not None:
            self._interval.set(interval_seconds)

"""Limits that an alert and a dashboard share; times are in `windows.py`."""

DATA_WAIT = 0.1
"""Share of a rank's time spent waiting for data."""
CHECKPOINT_INTERVALS = 3
"""Age of the newest checkpoint, in intervals between checkpoints."""
LOST_TIME = 0.3
"""Share of a job's time lost to restarts and repeated steps."""
THROTTLED = 0.05
"""Share of time in which the clock of a GPU is reduced."""
FAILED_RECONCILES = 0.5
"""Share of reconciles that fail."""

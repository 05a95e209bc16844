"""Account for the wall time of rank 0's process, for `Progress.spent`."""

from finetune_trainer.config import SPENT_AS, Phase, TimeSpent
from finetune_trainer.telemetry.step import StepReport


class SpentTime:
    """Clock that is always in one phase; waiting times of steps are subtracted from training.

    Steps are reported one step late, so the newest may still count as training entirely.
    """

    def __init__(self, since: float) -> None:
        """Begin in `Phase.STARTING`, at `since` seconds since the epoch."""
        self._since = since
        self._word = SPENT_AS[Phase.STARTING]
        self._seconds = dict.fromkeys(TimeSpent.model_fields, 0.0)
        self._waited = {"data": 0.0, "checkpoint": 0.0, "other": 0.0}

    def turn(self, phase: Phase, now: float) -> None:
        """Enter a phase."""
        self._seconds[self._word] += max(0.0, now - self._since)
        self._since, self._word = now, SPENT_AS[phase]

    def step(self, report: StepReport) -> None:
        """Subtract waits, and the start and stop of a profiler, from the step's training time."""
        self._waited["data"] += report.data_wait_seconds
        self._waited["checkpoint"] += report.checkpoint_blocking_seconds
        self._waited["other"] += report.profiling_seconds

    def at(self, now: float) -> TimeSpent:
        """Return the seconds up to `now`, rounded to milliseconds."""
        seconds = dict(self._seconds)
        seconds[self._word] += max(0.0, now - self._since)
        for word, waited in self._waited.items():
            waited = min(waited, seconds["training"])
            seconds["training"] -= waited
            seconds[word] += waited
        return TimeSpent(**{word: round(one, 3) for word, one in seconds.items()})

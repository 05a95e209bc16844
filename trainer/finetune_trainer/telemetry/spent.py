"""`SpentTime`: where the wall time of rank 0's process went, for `Progress.spent`."""

from finetune_trainer.config import SPENT_AS, Phase, TimeSpent
from finetune_trainer.telemetry.step import StepReport


class SpentTime:
    """A clock that is always in exactly one phase; what steps waited for is taken out of training.

    Steps are reported one late, so the newest may still count as training altogether.
    """

    def __init__(self, since: float) -> None:
        """Begin in `Phase.STARTING`, at `since` seconds since the epoch."""
        self._since = since
        self._word = SPENT_AS[Phase.STARTING]
        self._seconds = dict.fromkeys(TimeSpent.model_fields, 0.0)
        self._waited = {"data": 0.0, "checkpoint": 0.0}

    def turn(self, phase: Phase, now: float) -> None:
        """Be in this phase from now on."""
        self._seconds[self._word] += max(0.0, now - self._since)
        self._since, self._word = now, SPENT_AS[phase]

    def step(self, report: StepReport) -> None:
        """Take what a step waited for out of the time that it trained."""
        self._waited["data"] += report.data_wait_seconds
        self._waited["checkpoint"] += report.checkpoint_blocking_seconds

    def at(self, now: float) -> TimeSpent:
        """Return the seconds up to `now`, in whole milliseconds."""
        seconds = dict(self._seconds)
        seconds[self._word] += max(0.0, now - self._since)
        for word, waited in self._waited.items():
            waited = min(waited, seconds["training"])
            seconds["training"] -= waited
            seconds[word] += waited
        return TimeSpent(**{word: round(one, 3) for word, one in seconds.items()})

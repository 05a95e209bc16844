"""Measure how long a user waited for the first step, for `Progress.first_step_seconds`."""

from finetune_trainer.config import Phase

# Phases before the first step that a user has requested and that do not count as start-up.
_NOT_START_UP = (Phase.EVALUATING, Phase.ANSWERING)


class StartUp:
    """Clock that runs from the attempt's first process to the first step.

    Attributes:
        is_over: Whether the first step has finished.
    """

    def __init__(self, since: float, now: float) -> None:
        """Count from `since` and be in `Phase.STARTING` at `now`, both in epoch seconds."""
        self.is_over = False
        self._since = since
        self._phase = Phase.STARTING
        self._phase_since = now
        self._left_out_seconds = 0.0

    def turn(self, phase: Phase, now: float) -> None:
        """Enter a phase."""
        if self._phase in _NOT_START_UP:
            self._left_out_seconds += now - self._phase_since
        self._phase, self._phase_since = phase, now

    def step(self, at: float) -> float | None:
        """Return the seconds to the first step, finished at `at`; None for all other steps."""
        if self.is_over:
            return None
        self.is_over = True
        return max(0.0, at - self._since - self._left_out_seconds)

"""Early stopping: counts the evaluations since the held-out loss last fell.

The loop asks after each evaluation. Every rank sees the same losses, so all count alike.
"""

from finetune_trainer.config import EarlyStopping


class Patience:
    """How long training may go on without getting better; without settings, for ever.

    Attributes:
        best: Lowest held-out loss that counted as an improvement.
        misses: Evaluations since then.
    """

    def __init__(self, settings: EarlyStopping | None) -> None:
        self.best: float | None = None
        self.misses = 0
        self._settings = settings

    def improves(self, loss: float | None) -> bool:
        """Count one evaluation, and return whether this model is worth a checkpoint of its own.

        None, where the evaluation was broken off, counts for nothing.
        """
        if self._settings is None or loss is None:
            return False
        if self.best is None or loss < self.best - self._settings.min_delta:
            self.best, self.misses = loss, 0
            return True
        self.misses += 1
        return False

    @property
    def is_over(self) -> bool:
        """Whether `patience` evaluations brought no improvement."""
        return self._settings is not None and self.misses >= self._settings.patience

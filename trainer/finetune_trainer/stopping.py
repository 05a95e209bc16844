"""Early stopping: count the evaluations since the held-out loss last improved.

The loop calls it after each evaluation. All ranks see the same losses and count alike.
"""

from finetune_trainer.config import EarlyStopping


class Patience:
    """How long training may continue without improvement; indefinitely without settings.

    Attributes:
        best: Lowest held-out loss that counted as an improvement.
        misses: Evaluations since then.
    """

    def __init__(self, settings: EarlyStopping | None) -> None:
        self.best: float | None = None
        self.misses = 0
        self._settings = settings

    def improves(self, loss: float | None) -> bool:
        """Count one evaluation and return whether the loss improved, which is worth a checkpoint.

        An interrupted evaluation, whose loss is None, is ignored.
        """
        if self._settings is None or loss is None:
            return False
        if self.best is None or loss < self.best - self._settings.min_delta:
            self.best, self.misses = loss, 0
            return True
        self.misses += 1
        return False

    @property
    def is_exhausted(self) -> bool:
        """Whether `patience` evaluations brought no improvement."""
        return self._settings is not None and self.misses >= self._settings.patience

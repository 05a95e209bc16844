"""Refuse a new run for what a run that has a checkpoint is only warned about.

A check that a later version adds must not stop a run that an earlier version began.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from finetune_trainer.errors import TrainerError


@dataclass(frozen=True)
class Refusals:
    """Raises an error in a new run, and warns in a run that has a checkpoint.

    Attributes:
        is_new: Whether the run has no checkpoint to resume from.
        warn: Receives the sentence of the error.
    """

    is_new: bool
    warn: Callable[[str], None]

    def refuse(self, error: TrainerError) -> None:
        """Raise `error` in a new run.

        Raises:
            TrainerError: the run is new.
        """
        if self.is_new:
            raise error
        self.warn(f"{error}; a new run would be refused, and this one resumes from its checkpoint")


SILENT = Refusals(is_new=False, warn=lambda _: None)
"""Neither refuses nor warns; for a first look at a model that is checked when it is loaded."""

STRICT = Refusals(is_new=True, warn=warnings.warn)
"""Refuses every run; for callers without checkpoints."""

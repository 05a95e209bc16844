"""Data plans over sequences of which only the lengths are known."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from finetune_trainer.data.plan import DataPlan
from finetune_trainer.data.sequences import TokenDataset
from support.launch.launches import train_config

CAPACITY = 64


@dataclass(frozen=True)
class Lengths:
    """A data set of which only the lengths are known; half of each sequence is predicted."""

    lengths: np.ndarray
    fingerprint: str = "rows"
    weights: np.ndarray = field(default_factory=lambda: np.ones(1))

    @property
    def label_counts(self) -> np.ndarray:
        return (self.lengths // 2).astype(np.int32)


def lengths(*values: int, weights: list[float] | None = None, fingerprint: str = "rows") -> Lengths:
    """Return sequences of these lengths; all have weight 1 unless `weights` gives each its own."""
    given = np.asarray(weights or [1.0] * len(values))
    return Lengths(np.asarray(values, np.int32), fingerprint, given)


def random_lengths(count: int) -> Lengths:
    """Return sequences of random lengths, the same ones every time."""
    return lengths(*np.random.default_rng(7).integers(2, CAPACITY, count, endpoint=True))


def plan(dataset: Lengths, **changes: Any) -> DataPlan:
    """Return the plan of one epoch in steps of 4 packs, but for what `changes` says."""
    data = {
        "max_seq_len": changes.pop("max_seq_len", CAPACITY),
        "packing": changes.pop("packing", True),
    }
    epochs = None if "max_steps" in changes else 1
    training = {"seed": 1, "global_batch_size": 4, "max_steps": None, "epochs": epochs} | changes
    config = train_config(Path("unused"), world={"nproc_per_node": 1}, data=data, training=training)
    # It asks for lengths, counts and weights alone.
    return DataPlan.of(cast(TokenDataset, dataset), config)


def sequences(made: DataPlan, steps: range) -> list[int]:
    """Return the sequences of these steps, in their order."""
    return [index for step in steps for pack in made.packs(step) for index in pack]

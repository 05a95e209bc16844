"""The runs of `kill_series` and `failover_series`: two ranks, eight steps, every failpoint."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.config import TrainConfig
from finetune_trainer.failpoints import POINTS
from support.launch.launches import train_config

STEPS, SAVE_EVERY, EVAL_EVERY = 8, 2, 4

_EVERY_STEP = tuple(range(1, STEPS + 1))
_SAVES = tuple(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
# Steps and ranks that reach a point; step 0 if the point has no step, and no rank if either of the
# ranks reaches it.
_PLACES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "tokenizing": ((0,), (0, 1)),
    "storing-tokens": ((0,), ()),
    "loading": ((0,), (0, 1)),
    "evaluating": ((0, 4, 8), (0, 1)),
    "answering": ((0, 8), (0,)),
    "first-step": ((1,), (0, 1)),
    "mid-accumulation": (_EVERY_STEP, (0, 1)),
    "before-optimizer": (_EVERY_STEP, (0, 1)),
    "after-optimizer": (_EVERY_STEP, (0, 1)),
    "saving": (_SAVES, (0,)),
    "before-manifest": (_SAVES, (0, 1)),
    "before-commit": (_SAVES, (0,)),
    "after-commit": (_SAVES, (0,)),
    "retention": ((6,), (0,)),
    "restoring": ((), (0, 1)),
    "exporting": ((8,), (0,)),
    "before-publish": ((8,), (0,)),
}
assert set(_PLACES) == set(POINTS)


def draw_point(rng: random.Random, name: str) -> str:
    """Draw step and rank of a failpoint."""
    steps, ranks = _PLACES[name]
    step = f"@{rng.choice(steps)}" if steps else ""
    return f"{name}{step}:rank={rng.choice(ranks)}" if ranks else f"{name}{step}"


def series_config(folder: Path, inputs: Path, strategy: str, **changes: Any) -> TrainConfig:
    """Return the configuration of a run below `folder`; `changes` are as of `train_config`."""
    values: dict[str, Any] = {
        "model": {"path": str(inputs / "model")},
        "data": {
            "train": {"path": str(inputs / "train.jsonl")},
            "eval": {"path": str(inputs / "eval.jsonl")},
            "max_seq_len": 64,
        },
        "strategy": {"type": strategy},
        "training": {
            "max_steps": STEPS,
            "eval_every_steps": EVAL_EVERY,
            "learning_rate": 1e-2,
            # Shows whether a resumed run draws the masks of the unbroken run.
            "dropout": 0.1,
        },
        "checkpoint": {"every_steps": SAVE_EVERY},
        "telemetry": {"sample_prompts": ["What is 1 plus 1?"]},
    }
    for name, value in changes.items():
        values[name] = {**values[name], **value} if name in values else value
    return train_config(folder, **values)


@dataclass(frozen=True)
class Outcome:
    """All that must be the same: weights by file, and each step's and evaluation's numbers."""

    weights: dict[str, str]
    steps: dict[int, tuple[float, ...]]
    evaluations: dict[int, float]

    def difference(self, other: "Outcome") -> str:
        """Name the parts that differ; empty if all are equal."""
        names = ("weights", "steps", "evaluations")
        return ", ".join(name for name in names if getattr(self, name) != getattr(other, name))

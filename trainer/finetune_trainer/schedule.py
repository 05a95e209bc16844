"""Learning rate as a pure function of the step, so that a resume needs no scheduler state."""

import math

from finetune_trainer.config import TrainingConfig


def learning_rate(training: TrainingConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    It rises linearly over the warm-up steps, then stays (constant), falls linearly to 0 (linear),
    or follows half a cosine to 0 (cosine, arXiv:1608.03983 without restarts).
    """
    warmup = warmup_steps(training, total_steps)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    if training.schedule == "constant":
        return training.learning_rate
    done = (step - warmup) / max(total_steps - warmup, 1)
    if training.schedule == "linear":
        return training.learning_rate * (1 - done)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def warmup_warning(training: TrainingConfig, total_steps: int) -> str | None:
    """Return a warning if the rate is still rising at the end, else None."""
    steps = warmup_steps(training, total_steps)
    if steps < total_steps or steps <= 1:  # a single step uses the full rate
        return None
    return (
        f"spec.training.warmup {training.warmup:g} takes all {total_steps} steps, so the learning "
        f"rate only rises, to {100 * total_steps / steps:.1f} % of spec.training.learningRate; "
        "lower it or train longer"
    )


def warmup_steps(training: TrainingConfig, total_steps: int) -> int:
    """Return the number of warm-up steps; a share of all steps is rounded up."""
    if training.warmup < 1:
        return math.ceil(training.warmup * total_steps)
    return int(training.warmup)

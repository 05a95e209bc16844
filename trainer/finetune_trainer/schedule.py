"""Learning rate as a pure function of the step, so that a resume needs no scheduler state."""

import math

from finetune_trainer.config import FEW_STEPS, TrainingConfig


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


def few_steps_warning(training: TrainingConfig, total_steps: int) -> str | None:
    """Return a warning if the epochs of a run give fewer than 10 optimizer steps, else None.

    A run whose manifest sets `maxSteps` has as many steps as its author wants.
    """
    if training.epochs is None or total_steps >= FEW_STEPS:
        return None
    steps = f"{total_steps} optimizer step{'s' * (total_steps > 1)}"
    return (
        f"the whole run has {steps}, which change the model little; lower "
        "spec.training.globalBatchSize or spec.training.maxSeqLength, or raise spec.training.epochs"
    )


def warmup_steps(training: TrainingConfig, total_steps: int) -> int:
    """Return the number of warm-up steps; a share of all steps is rounded up."""
    if training.warmup < 1:
        return math.ceil(training.warmup * total_steps)
    return int(training.warmup)

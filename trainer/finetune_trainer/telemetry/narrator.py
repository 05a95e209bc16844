"""Print rank 0's progress for `kubectl logs` and terminals: a few lines on standard output."""

from contextlib import suppress

from finetune_trainer.config import Progress

_SECONDS_BETWEEN_STEPS = 10.0


class Narrator:
    """Prints events and some steps: the first, the last, and one every ten seconds."""

    def __init__(self) -> None:
        self._step_printed_at = float("-inf")

    def line(self, sentence: str) -> None:
        """Print a line; a full disk or a closed reader does not end training."""
        with suppress(OSError):
            print(sentence, flush=True)

    def is_due(self, now: float) -> bool:
        """Whether the last step was printed long enough ago; `now` is in seconds of any clock."""
        return now - self._step_printed_at >= _SECONDS_BETWEEN_STEPS

    def step(self, progress: Progress) -> None:
        """Print the current progress."""
        self._step_printed_at = progress.time
        figures = {
            "loss": progress.loss,
            "grad norm": progress.grad_norm,
            "learning rate": progress.learning_rate,
            "tokens/s": progress.tokens_per_second,
        }
        known = [f"{name} {value:.4g}" for name, value in figures.items() if value is not None]
        of_all = "" if progress.total_steps is None else f"/{progress.total_steps}"
        left = "" if progress.eta_seconds is None else f"{progress.eta_seconds:.0f}s left"
        self.line("  ".join([f"step {progress.step}{of_all}", *known, *([left] if left else [])]))

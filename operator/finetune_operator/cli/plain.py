"""Output of `ftctl run` to a file or a pipe: a line for each event, and progress at intervals.

Only the newest of several checkpoints or evaluations between two views is printed; the log of rank
0 has all of them.
"""

from collections.abc import Callable
from typing import Self, TextIO

from finetune_operator.cli.view import View, duration, news

LINE_SECONDS = 5.0


class PlainScreen:
    """Writes a line per change of phase and per event, and at most one line per 5 s for steps.

    Args:
        out: Stream of the lines.
        first: The view before the start; only differences from it are printed.
        clock: Monotonic seconds.
    """

    def __init__(self, out: TextIO, first: View, clock: Callable[[], float]) -> None:
        self._out = out
        self._clock = clock
        self._start = clock()
        self._last = first
        self._phase = ""
        self._printed_step = first.progress.step
        self._printed_at = self._start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._printed_step != self._last.progress.step:
            self._print_step(self._last)

    def show(self, view: View) -> None:
        """Write the changes since the last view."""
        before, self._last = self._last, view
        changed = view.phase != self._phase
        late = self._clock() - self._printed_at >= LINE_SECONDS
        if view.progress.step == view.progress.resumed_step:
            self._printed_step = view.progress.step  # printed as the checkpoint's step
        # The last steps of a phase are printed before the next phase.
        if view.progress.step != self._printed_step and (changed or late):
            self._print_step(view)
        for sentence in news(before, view):
            self.note(sentence)
        if changed:
            self._phase = view.phase
            self.note(view.phase)

    def note(self, sentence: str) -> None:
        """Write a line with the time since the start."""
        elapsed = duration(self._clock() - self._start)
        self._out.write(f"{elapsed:>6}  {sentence}\n")
        self._out.flush()

    def _print_step(self, view: View) -> None:
        self._printed_step, self._printed_at = view.progress.step, self._clock()
        self.note("  ".join(step_facts(view)))


def step_facts(view: View) -> list[str]:
    """Return the known facts of the newest step, the most important first."""
    progress = view.progress
    total = f"/{progress.total_steps}" if progress.total_steps else ""
    facts = [f"step {progress.step}{total}"]
    if progress.loss is not None:
        facts.append(f"loss {progress.loss:.3f}")
    if progress.tokens_per_second is not None:
        facts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.eta_seconds is not None:
        facts.append(f"{duration(progress.eta_seconds)} left")
    return facts

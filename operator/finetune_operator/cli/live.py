"""Output of `ftctl run` on a terminal: a frame stays in place, and events scroll above it."""

from collections.abc import Callable
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from finetune_operator.cli.view import View, duration, news

# Enough for a smooth spinner, with a cost that is not measurable on two cores.
FRAMES_PER_SECOND = 5
SHOWN_WARNINGS = 2
_STYLES = {"Training": "green", "Failed": "red", "Succeeded": "green", "Suspended": "yellow"}


class LiveScreen:
    """Redraws the newest view in place and prints events above it.

    Args:
        console: Terminal to draw on.
        first: The view before the start; only differences from it become events.
        clock: Monotonic seconds.
    """

    def __init__(self, console: Console, first: View, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._start = clock()
        self._view = first
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            console=console,
            get_renderable=lambda: frame(self._view, clock() - self._start, self._spinner),
            refresh_per_second=FRAMES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def show(self, view: View) -> None:
        """Print the events since the last view; the frame is redrawn within 0.2 s."""
        before, self._view = self._view, view
        for sentence in news(before, view):
            self.note(sentence)

    def note(self, sentence: str) -> None:
        """Print a line above the frame, with the time since the start."""
        elapsed = duration(self._clock() - self._start)
        style = "yellow" if sentence.startswith(("warning:", "attempt")) else ""
        self._console.print(
            Text.assemble((f"{elapsed:>6}  ", "dim"), (sentence, style)), highlight=False
        )


def frame(view: View, elapsed_seconds: float, spinner: Spinner | None = None) -> RenderableType:
    """Build the frame."""
    warnings = view.progress.warnings[-SHOWN_WARNINGS:]
    return Group(
        _headline(view, elapsed_seconds, spinner),
        _bar(view),
        _facts(view),
        *(Text(f"! {one}", style="yellow") for one in warnings),
    )


def _headline(view: View, elapsed_seconds: float, spinner: Spinner | None) -> RenderableType:
    line = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, None, None, 1):
        line.add_column(ratio=ratio, justify="right" if ratio else "left", no_wrap=True)
    line.add_row(
        spinner or "",
        Text(view.name, style="bold"),
        Text(view.phase, style=_STYLES.get(view.phase, "cyan")),
        Text(duration(elapsed_seconds), style="dim"),
    )
    return line


def _bar(view: View) -> RenderableType:
    progress = view.progress
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    left = f"{duration(progress.eta_seconds)} left" if progress.eta_seconds is not None else ""
    total = progress.total_steps
    line.add_row(
        ProgressBar(
            total=total or 1.0,
            completed=progress.step if total else 0.0,
            complete_style="green",
            finished_style="green",
        ),
        Text(f"step {progress.step}/{total or '?'}  {left}"),
    )
    return line


def _facts(view: View) -> RenderableType:
    progress, facts = view.progress, list[Text]()
    if progress.loss is not None:
        facts.append(_fact("loss", f"{progress.loss:.3f}"))
    if (held_out := _held_out(view)) is not None:
        facts.append(_fact("held-out", held_out))
    if progress.tokens_per_second is not None:
        facts.append(_fact("tokens/s", f"{progress.tokens_per_second:,.0f}"))
    if progress.checkpoint is not None:
        facts.append(_fact("checkpoint", f"step {progress.checkpoint.step}"))
    restarts = f"{view.restarts}/{view.max_restarts}"
    if view.disruptions:
        restarts += f" + {view.disruptions} preempted"
    facts.append(_fact("restarts", restarts))
    return Text("   ").join(facts)


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def _held_out(view: View) -> str | None:
    before, now = view.progress.eval_loss_before, view.progress.eval_loss
    if before is None or now is None or now == before:
        known = before if now is None else now
        return None if known is None else f"{known:.3f}"
    return f"{before:.3f} → {now:.3f}"

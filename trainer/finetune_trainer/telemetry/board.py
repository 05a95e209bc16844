"""Draw rank 0's curves in TensorBoard; the file opens on first use and again after a full disk."""

from collections.abc import Callable
from pathlib import Path

from finetune_trainer.telemetry.step import StepReport
from finetune_trainer.telemetry.tensorboard import TensorBoardWriter

_DRAWN_AT_FIRST = 100
_SECONDS_BETWEEN_POINTS = 1.0

Values = dict[str, float | None]
"""Values by tag."""


class Board:
    """Draws all evaluations and some steps: the first hundred, one per second, and the newest.

    Drawing a point takes longer than the rest of a step's report, and a screen has only some
    thousand columns.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float],
        put: Callable[[Callable[[], None]], bool],
        has_room: Callable[[], bool],
    ) -> None:
        """Prepare without opening a file.

        Args:
            folder: Folder of the event files.
            clock: Seconds since the epoch.
            put: Calls a function that writes; returns whether the write succeeded.
            has_room: Whether the disk has room.
        """
        self._folder = folder
        self._clock = clock
        self._put = put
        self._has_room = has_room
        self._writer: TensorBoardWriter | None = None
        self._num_drawn = 0
        self._drawn_at = float("-inf")
        self._left_out: tuple[int, Values] | None = None

    def step(self, report: StepReport, tokens_per_second: float | None, at: float) -> None:
        """Draw the step that finished at `at` (seconds), or remember it as the newest."""
        step = report.step
        values = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/learning_rate": report.learning_rate,
            "train/tokens_per_second": tokens_per_second,
        }
        is_due = at - self._drawn_at >= _SECONDS_BETWEEN_POINTS
        if is_due or self._num_drawn < _DRAWN_AT_FIRST:
            self._num_drawn, self._drawn_at, self._left_out = self._num_drawn + 1, at, None
            self._draw(lambda writer: writer.scalars(step, values))
        else:
            self._left_out = step, values

    def evaluation(self, step: int, values: Values) -> None:
        """Draw the newest step, then an evaluation."""
        self._draw_newest()
        self._draw(lambda writer: writer.scalars(step, values))

    def purge(self, step: int) -> None:
        """Hide the points that an earlier attempt drew from `step` on."""
        self._draw(lambda writer: writer.purge(step))

    def close(self) -> None:
        """Draw the newest step and close the open file."""
        self._draw_newest()
        if self._writer is not None:
            self._put(self._writer.close)
            self._writer = None

    def _draw_newest(self) -> None:
        newest, self._left_out = self._left_out, None
        if newest is not None:
            self._draw(lambda writer: writer.scalars(*newest))

    def _draw(self, write: Callable[[TensorBoardWriter], None]) -> None:
        if not self._has_room():
            return

        def draw() -> None:
            if self._writer is None:  # its import is slow
                self._writer = TensorBoardWriter(self._folder, clock=self._clock)
            write(self._writer)

        if not self._put(draw):
            self._writer = None  # its thread has ended; the next draw opens a new file

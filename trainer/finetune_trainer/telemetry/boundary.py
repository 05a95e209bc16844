"""Where a rank's time had gone at the end of its newest step, for whoever compares ranks.

Counters that are read in the middle of a step say more of when they were read than of the rank. So
the rank notes the sums at the end of each step, in its block; it costs a microsecond.
"""

import time
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from finetune_trainer.config import ContractModel
from finetune_trainer.config.metrics import PHASE_SECONDS, TimedPhase
from finetune_trainer.telemetry.slots import Block, Word, layout_of_node

_place = layout_of_node().place
_EXPOSED = _place(PHASE_SECONDS, TimedPhase.COMM_EXPOSED)
# Plain numbers, as members of an enum take their time.
_SUMS = (
    (int(Word.BOUNDARY_DATA), _place(PHASE_SECONDS, TimedPhase.DATA_WAIT)),
    (int(Word.BOUNDARY_CHECKPOINT), _place(PHASE_SECONDS, TimedPhase.CHECKPOINT_BLOCKING)),
    (int(Word.BOUNDARY_APART), _place(PHASE_SECONDS, TimedPhase.EVAL)),
)
_SEEN_AT, _AT, _WAITING = int(Word.SEEN_AT), int(Word.BOUNDARY_AT), int(Word.BOUNDARY_WAITING)
_BEGUN, _WRITTEN = int(Word.BOUNDARIES_BEGUN), int(Word.BOUNDARIES_WRITTEN)

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Boundary(ContractModel):
    """A rank at the end of its newest step; all but `steps` and `at` add up since its start.

    Attributes:
        steps: how many it has ended, of this attempt.
        at: when that was, on its machine's monotonic clock.
        waiting_seconds: spent in collectives while nothing else was done.
        data_seconds: spent waiting for data.
        checkpoint_seconds: spent in saves that a step waits for.
        apart_seconds: spent on what no step has, such as evaluation.
    """

    steps: Annotated[int, Field(ge=0)]
    at: Seconds
    waiting_seconds: Seconds
    data_seconds: Seconds
    checkpoint_seconds: Seconds
    apart_seconds: Seconds


class StepBoundaries:
    """Notes the ends of steps in a rank's block."""

    def __init__(self, block: Block, clock: Callable[[], float] = time.monotonic) -> None:
        """Go on where an earlier process of this rank ended."""
        self._numbers, self._clock = block.numbers, clock
        self._steps = self._numbers[Word.BOUNDARIES_WRITTEN]

    def mark(self, exposed_seconds: float | None) -> None:
        """Note that a step has ended now, which is also a sign of life.

        `exposed_seconds` is for how long this rank could do nothing but wait in collectives, since
        its start; None where only the device knows, which the phases go by.
        """
        numbers = self._numbers
        self._steps = steps = self._steps + 1
        numbers[_BEGUN] = steps
        numbers[_AT] = numbers[_SEEN_AT] = self._clock()
        numbers[_WAITING] = numbers[_EXPOSED] if exposed_seconds is None else exposed_seconds
        for word, place in _SUMS:
            numbers[word] = numbers[place]
        numbers[_WRITTEN] = steps


def read_boundary(numbers: Sequence[float]) -> Boundary | None:
    """Return the newest boundary in a block that was read from its beginning to its end.

    None before the first, and where one was written meanwhile.
    """
    steps = numbers[Word.BOUNDARIES_WRITTEN]
    if steps == 0 or steps != numbers[Word.BOUNDARIES_BEGUN]:
        return None
    return Boundary(
        steps=int(steps),
        at=numbers[Word.BOUNDARY_AT],
        waiting_seconds=numbers[Word.BOUNDARY_WAITING],
        data_seconds=numbers[Word.BOUNDARY_DATA],
        checkpoint_seconds=numbers[Word.BOUNDARY_CHECKPOINT],
        apart_seconds=numbers[Word.BOUNDARY_APART],
    )

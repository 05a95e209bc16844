"""Publish a rank's cumulative times at the end of its newest step, for comparisons between ranks.

Counters that are read in the middle of a step depend more on the moment of reading than on the
rank. The rank therefore copies the sums into its block at the end of each step, which costs a
microsecond.
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
_EVAL = _place(PHASE_SECONDS, TimedPhase.EVAL)
_PROFILING = _place(PHASE_SECONDS, TimedPhase.PROFILING)
# Plain numbers, because access to enum members is slow.
_SUMS = (
    (int(Word.BOUNDARY_DATA), _place(PHASE_SECONDS, TimedPhase.DATA_WAIT)),
    (int(Word.BOUNDARY_CHECKPOINT), _place(PHASE_SECONDS, TimedPhase.CHECKPOINT_BLOCKING)),
)
_SEEN_AT, _AT, _WAITING = int(Word.SEEN_AT), int(Word.BOUNDARY_AT), int(Word.BOUNDARY_WAITING)
_APART = int(Word.BOUNDARY_APART)
_BEGUN, _WRITTEN = int(Word.BOUNDARIES_BEGUN), int(Word.BOUNDARIES_WRITTEN)

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Boundary(ContractModel):
    """State of a rank at the end of its newest step.

    All fields except `steps` and `at` are sums since the start of the rank.

    Attributes:
        steps: Steps finished in this attempt.
        at: End of the step on the machine's monotonic clock.
        waiting_seconds: Time in collectives without other work.
        data_seconds: Time waiting for data.
        checkpoint_seconds: Time in saves that block a step.
        apart_seconds: Time in work outside of steps, such as evaluation, and in profiled steps,
            whose times cannot be compared.
    """

    steps: Annotated[int, Field(ge=0)]
    at: Seconds
    waiting_seconds: Seconds
    data_seconds: Seconds
    checkpoint_seconds: Seconds
    apart_seconds: Seconds


class StepBoundaries:
    """Records the ends of steps in a rank's block."""

    def __init__(self, block: Block, clock: Callable[[], float] = time.monotonic) -> None:
        """Continue the count of an earlier process of this rank."""
        self._numbers, self._clock = block.numbers, clock
        self._steps = self._numbers[Word.BOUNDARIES_WRITTEN]
        self._profiled_seconds = 0.0
        self._marked_at = self._apart_at = 0.0

    def mark(self, exposed_seconds: float | None, *, is_profiled: bool = False) -> None:
        """Record that a step has just ended; also counts as a report of the rank.

        Args:
            exposed_seconds: Time that the rank has only waited in collectives since its start; None
                if only the device can measure it, in which case the phase clock counts.
            is_profiled: Whether a rank has recorded a profile since the previous mark.
        """
        numbers = self._numbers
        self._steps = steps = self._steps + 1
        numbers[_BEGUN] = steps
        numbers[_AT] = numbers[_SEEN_AT] = self._clock()
        numbers[_WAITING] = numbers[_EXPOSED] if exposed_seconds is None else exposed_seconds
        for word, place in _SUMS:
            numbers[word] = numbers[place]
        apart = numbers[_EVAL] + numbers[_PROFILING]
        if is_profiled:
            self._profiled_seconds += numbers[_AT] - self._marked_at - (apart - self._apart_at)
        self._marked_at, self._apart_at = numbers[_AT], apart
        numbers[_APART] = apart + self._profiled_seconds
        numbers[_WRITTEN] = steps


def read_boundary(numbers: Sequence[float]) -> Boundary | None:
    """Read the newest boundary from a block that was copied front to back.

    Returns:
        None before the first boundary, or if one was written during the copy.
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

"""What the collectives of a rank cost: calls, bytes, seconds, and the numbers of the newest.

`Collectives` is what the rest of the trainer sees of it. Groups of gloo are seen by `intercept`,
those of NCCL by `flight_recorder`; both count in the same `Tallies`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from finetune_trainer.config import StrategyConfig
from finetune_trainer.telemetry.collectives.flight_recorder import FlightRecorder, recorder_of_nccl
from finetune_trainer.telemetry.collectives.groups import GroupNames
from finetune_trainer.telemetry.collectives.intercept import Interception
from finetune_trainer.telemetry.collectives.tally import Tallies

if TYPE_CHECKING:
    from finetune_trainer.telemetry.phases import PhaseClock
    from finetune_trainer.telemetry.slots import Block


class Collectives:
    """The collectives of one rank, in its block."""

    def __init__(
        self,
        block: "Block",
        strategy: StrategyConfig,
        warn: Callable[[str], None],
        phases: "PhaseClock | None" = None,
    ) -> None:
        """Prepare; nothing is seen before `watched`. `phases` learns of the time that is waited."""
        self._block = block
        self._names = GroupNames(strategy)
        self._warn = warn
        self._tallies = Tallies(block)
        is_ddp = strategy.type == "ddp"
        self._interception = Interception(
            block, self._tallies, self._names, is_ddp=is_ddp, phases=phases
        )
        self._recorder: FlightRecorder | None = None
        self._is_of_gloo = False

    @contextmanager
    def watched(self, *, uses_nccl: bool) -> Iterator[None]:
        """See all collectives that begin in the block, from the thread that enters it."""
        self._is_of_gloo = not uses_nccl
        if uses_nccl:
            self._recorder = FlightRecorder(
                self._block,
                self._tallies,
                self._names,
                recorder=recorder_of_nccl(),
                warn=self._warn,
            )
        with self._interception:
            yield
            self._interception.read()
        if self._recorder is not None:
            self._recorder.read(is_last=True)
            self._tallies.say_sampled()

    def begin(self) -> None:
        """Count from now on; before, when the model is divided, collectives have numbers only."""
        self.read()
        if self._recorder is not None:
            self._recorder.read()
        self._tallies.is_counting = True

    def stepped(self) -> float | None:
        """Note that a step is over, from the thread that trains.

        Return the seconds in which the rank could only wait for others so far, in steps; None where
        that is not known.
        """
        self._interception.end_backward()
        if self._recorder is not None:
            self._recorder.read()
        return self._interception.waited_seconds if self._is_of_gloo else None

    def read(self) -> None:
        """Count what came to light since the last call: now and then, by the same thread."""
        self._interception.read()
        self._tallies.say_sampled()

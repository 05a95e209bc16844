"""Measure a rank's collectives: calls, bytes, seconds, and the newest sequence numbers.

The rest of the trainer uses `Collectives`. `intercept` observes gloo groups, `flight_recorder`
NCCL groups; both count in the same `Tallies`.
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
    """Collectives of one rank, counted in its block."""

    def __init__(
        self,
        block: "Block",
        strategy: StrategyConfig,
        warn: Callable[[str], None],
        phases: "PhaseClock | None" = None,
    ) -> None:
        """Prepare; observation begins with `watched`. `phases` receives the waiting time."""
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

    def chose(self, strategy: StrategyConfig) -> None:
        """Name the groups of the strategy that the trainer has chosen, before it creates any."""
        self._names.use(strategy)

    @contextmanager
    def watched(self, *, uses_nccl: bool) -> Iterator[None]:
        """Observe all collectives that begin in the block, from the thread that enters it."""
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
            self._tallies.publish_sampled()

    def begin(self) -> None:
        """Start to count; before that, only sequence numbers are counted."""
        self.read()
        if self._recorder is not None:
            self._recorder.read()
        self._tallies.is_counting = True

    def stepped(self) -> float | None:
        """Record the end of a step, from the training thread.

        Returns:
            Seconds of all steps so far in which the rank only waited for others; None if not known.
        """
        self._interception.end_backward()
        if self._recorder is not None:
            self._recorder.read()
        return self._interception.waited_seconds if self._is_of_gloo else None

    def read(self) -> None:
        """Count the collectives found since the last call; called now and then by one thread."""
        self._interception.read()
        self._tallies.publish_sampled()

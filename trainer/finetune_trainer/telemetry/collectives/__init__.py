"""What the collectives of a rank cost: calls, bytes, seconds, and the numbers of the newest.

`Collectives` is what the rest of the trainer sees of it. Groups of gloo are seen by `intercept`,
those of NCCL by `recorder`; both count in the same `Tallies`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from finetune_trainer.telemetry.collectives.groups import GroupNames
from finetune_trainer.telemetry.collectives.intercept import Interception
from finetune_trainer.telemetry.collectives.recorder import FlightRecorder, recorder_of_nccl
from finetune_trainer.telemetry.collectives.sample import Backward
from finetune_trainer.telemetry.collectives.tally import Tallies

if TYPE_CHECKING:
    from finetune_trainer.telemetry.slots import Block


class Collectives:
    """The collectives of one rank, in its block."""

    def __init__(self, block: "Block", names: GroupNames, warn: Callable[[str], None]) -> None:
        """Prepare; nothing is seen before `watched`."""
        self._block = block
        self._names = names
        self._warn = warn
        self._tallies = Tallies(block)
        self._interception = Interception(block, self._tallies, names)
        self._recorder: FlightRecorder | None = None
        self._newest_backward: Callable[[], Backward | None] = lambda: None

    @contextmanager
    def watched(self, *, uses_nccl: bool) -> Iterator[None]:
        """See all collectives that begin in the block, from the thread that enters it."""
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
        if self._recorder is not None:
            self._recorder.read(is_last=True)
            self._tallies.say_sampled()

    def begin(self, newest_backward: Callable[[], Backward | None]) -> None:
        """Count from now on; before, when the model is divided, collectives have numbers only.

        `newest_backward` is that of the strategy.
        """
        self.read()
        self._newest_backward = newest_backward
        self._tallies.is_counting = True

    def read(self) -> None:
        """Take over what came to light since the last call; once a step."""
        self._interception.read(self._newest_backward())
        if self._recorder is not None:
            self._recorder.read()
        self._tallies.say_sampled()

"""What one rank's part of a step came to: tokens, padding, rows, model FLOPs."""

from typing import TypedDict

from finetune_trainer.data.batch import MicroBatch
from finetune_trainer.data.plan import Pack


class Work(TypedDict):
    """The fields of a `StepReport` that tell what a rank has done."""

    rank_tokens: int
    rank_samples: int
    rank_padding: int
    rank_flops: float | None


class StepWork:
    """Adds up the micro-batches of one step."""

    def __init__(self, flops_of_rows: memoryview | None) -> None:
        """Begin; `flops_of_rows` are those of each row, None that they are not known."""
        self._flops_of_rows = flops_of_rows
        self._rows: list[int] = []
        self._tokens = self._positions = 0

    def add(self, packs: tuple[Pack, ...], batch: MicroBatch) -> None:
        """Count a micro-batch, and the rows that it was made of."""
        for pack in packs:
            self._rows.extend(pack)
        self._tokens += batch.tokens
        self._positions += batch.input_ids.numel()

    def done(self) -> Work:
        """Return what was counted."""
        known = self._flops_of_rows
        return {
            "rank_tokens": self._tokens,
            "rank_samples": len(self._rows),
            "rank_padding": self._positions - self._tokens,
            "rank_flops": None if known is None else sum([known[row] for row in self._rows]),
        }

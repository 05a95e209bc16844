"""Count the tokens, padding, rows and model FLOPs of one rank in a step."""

from typing import TypedDict

from finetune_trainer.data.batch import MicroBatch
from finetune_trainer.data.plan import Pack


class Work(TypedDict):
    """Fields of a `StepReport` that count a rank's work."""

    rank_tokens: int
    rank_samples: int
    rank_padding: int
    rank_flops: float | None


class StepCounters:
    """Sums over the micro-batches of one step."""

    def __init__(self, flops_of_rows: memoryview | None) -> None:
        """Start at zero; `flops_of_rows` has the FLOPs of each row, or is None if not known."""
        self._flops_of_rows = flops_of_rows
        self._rows: list[int] = []
        self._tokens = self._positions = 0

    def add(self, packs: tuple[Pack, ...], batch: MicroBatch) -> None:
        """Count a micro-batch and its rows."""
        for pack in packs:
            self._rows.extend(pack)
        self._tokens += batch.tokens
        self._positions += batch.input_ids.numel()

    def done(self) -> Work:
        """Return the sums."""
        known = self._flops_of_rows
        return {
            "rank_tokens": self._tokens,
            "rank_samples": len(self._rows),
            "rank_padding": self._positions - self._tokens,
            "rank_flops": None if known is None else sum([known[row] for row in self._rows]),
        }

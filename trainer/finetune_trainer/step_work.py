"""What one rank's part of a step came to: tokens, padding, rows, model FLOPs."""

from typing import TypedDict

from finetune_trainer.data.batch import MicroBatch
from finetune_trainer.data.plan import Pack
from finetune_trainer.data.sequences import TokenDataset
from finetune_trainer.telemetry.flops import ModelFlops


class Work(TypedDict):
    """The fields of a `StepReport` that tell what a rank has done."""

    rank_tokens: int
    rank_samples: int
    rank_padding: int
    rank_flops: float | None


class StepWork:
    """Adds up the micro-batches of one step."""

    def __init__(self, dataset: TokenDataset, flops: ModelFlops | None) -> None:
        """Begin; `flops` says what a token takes, None that it is not known."""
        self._lengths = dataset.lengths
        self._flops = flops
        self._rows: list[int] = []
        self._tokens = self._positions = self._label_tokens = 0

    def add(self, packs: tuple[Pack, ...], batch: MicroBatch) -> None:
        """Count a micro-batch, and the rows that it was made of."""
        for pack in packs:
            self._rows.extend(pack)
        self._tokens += batch.tokens
        self._positions += batch.input_ids.numel()
        self._label_tokens += batch.label_tokens

    def done(self) -> Work:
        """Return what was counted."""
        lengths = [int(self._lengths[row]) for row in self._rows]
        flops = None if self._flops is None else self._flops.of(lengths, self._label_tokens)
        return {
            "rank_tokens": self._tokens,
            "rank_samples": len(self._rows),
            "rank_padding": self._positions - self._tokens,
            "rank_flops": flops,
        }

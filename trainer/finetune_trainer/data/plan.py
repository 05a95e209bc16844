"""Which packs each optimizer step trains on: a pure function of (seed, data set, step).

Every rank builds the same plan and asks it for any step, so resuming skips no data, the number of
label tokens of a step needs no collective, and another number of ranks keeps the same global
batches. With P packs an epoch and G packs a step, step `s` (counted from 0) owns positions
`s * G` to `(s + 1) * G - 1` of the endless stream epoch 0, epoch 1, ...; each epoch holds every
sequence once, in an order of its own. Only the very last step of a run may be smaller.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from finetune_trainer.config import DataReport, TrainConfig
from finetune_trainer.data.packing import IntArray, Packs, best_fit, one_sequence_each

Pack = tuple[int, ...]
"""Sequence indices laid out one after the other in one row of a batch; () is padding alone."""

COMPOSITION_EPOCH = -1  # the shuffle that decides which sequences share a pack, before any epoch


class SequenceLengths(Protocol):
    """What the plan needs of a data set; `TokenDataset` is one."""

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens and labels."""

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """(N,) tokens of each sequence."""

    @property
    def label_counts(self) -> npt.NDArray[np.int32]:
        """(N,) tokens of each sequence that are predicted."""


@dataclass(frozen=True, eq=False)
class DataPlan:
    """The order of all packs of a run; made by `build`.

    Attributes:
        total_steps: Optimizer steps of the whole run.
        packs_per_epoch: P, packs that hold every sequence once.
        fill_ratio: Share of P * max_seq_len positions that hold tokens.
        fingerprint: Hash of everything that decides the order. A checkpoint stores it: a step
            number means the same data only under the same fingerprint. It holds neither the
            number of ranks, the micro-batch nor the length of the run, which may change.
    """

    total_steps: int
    packs_per_epoch: int
    fill_ratio: float
    fingerprint: str
    _order_key: str
    _total_packs: int
    _global_batch_size: int
    _micro_batch_size: int
    _composition: Packs
    _pack_tokens: IntArray
    _pack_label_tokens: IntArray

    @classmethod
    def build(
        cls,
        dataset: SequenceLengths,
        *,
        seed: int,
        max_seq_len: int,
        packing: bool,
        global_batch_size: int,
        micro_batch_size: int,
        epochs: float | None = None,
        max_steps: int | None = None,
    ) -> Self:
        """Lay out a run of `epochs` (rounded up to a whole pack) or of `max_steps` full steps.

        `packing=False` gives every sequence a pack of its own. Takes about a second for a million
        sequences.

        Raises:
            ValueError: the data set holds no sequence, or not exactly one of `epochs` and
                `max_steps` is given.
        """
        if (epochs is None) == (max_steps is None):
            raise ValueError("give exactly one of epochs and max_steps")
        num_sequences = len(dataset.lengths)
        if not num_sequences:
            raise ValueError("the data set holds no sequence")
        order_key = f"{seed}:{dataset.fingerprint}"
        if packing:
            order = _permutation(order_key, COMPOSITION_EPOCH, num_sequences)
            composition = best_fit(order, dataset.lengths, max_seq_len)
        else:
            composition = one_sequence_each(num_sequences)
        pack_tokens = composition.sums(dataset.lengths)
        total_packs = _total_packs(len(composition), global_batch_size, epochs, max_steps)
        return cls(
            total_steps=math.ceil(total_packs / global_batch_size),
            packs_per_epoch=len(composition),
            fill_ratio=float(pack_tokens.sum()) / (len(composition) * max_seq_len),
            fingerprint=_plan_fingerprint(order_key, max_seq_len, packing, global_batch_size),
            _order_key=order_key,
            _total_packs=total_packs,
            _global_batch_size=global_batch_size,
            _micro_batch_size=micro_batch_size,
            _composition=composition,
            _pack_tokens=pack_tokens,
            _pack_label_tokens=composition.sums(dataset.label_counts),
        )

    @classmethod
    def of(cls, dataset: SequenceLengths, config: TrainConfig) -> Self:
        """Lay out the run that `config` describes; see `build`."""
        training = config.training
        return cls.build(
            dataset,
            seed=training.seed,
            max_seq_len=config.data.max_seq_len,
            packing=config.data.packing,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            epochs=training.epochs,
            max_steps=training.max_steps,
        )

    def epoch(self, step: int) -> float:
        """Return how many epochs are done after `step` optimizer steps."""
        return min(step * self._global_batch_size, self._total_packs) / self.packs_per_epoch

    def packs(self, step: int) -> tuple[Pack, ...]:
        """Return the packs of one optimizer step, all ranks together; steps count from 0."""
        return tuple(self._composition[pack] for pack in self._pack_ids(step))

    def tokens(self, step: int) -> int:
        """Return the tokens of one step, padding not counted."""
        return int(self._pack_tokens[self._pack_ids(step)].sum())

    def label_tokens(self, step: int) -> int:
        """Return the predicted tokens of one step, over all ranks: what its loss is divided by."""
        return int(self._pack_label_tokens[self._pack_ids(step)].sum())

    def rank_packs(self, step: int, rank: int, world_size: int) -> list[tuple[Pack, ...]]:
        """Return the micro-batches of one rank in one step, `micro_batch_size` packs each.

        Every rank gets the same number of micro-batches; where a last, smaller step runs out of
        packs, empty ones fill the places. The longest packs come first and equally long ones
        together: little padding, a memory peak in the first micro-batch, and ranks that take
        about equally long.
        """
        pack_ids = self._pack_ids(step)
        pack_ids = pack_ids[np.argsort(-self._pack_tokens[pack_ids], kind="stable")]
        size = self._micro_batch_size
        micro_batches = []
        for turn, start in enumerate(range(0, len(pack_ids), world_size * size)):
            # Ranks take turns in who gets the longest share.
            place = rank if turn % 2 == 0 else world_size - 1 - rank
            mine = pack_ids[start + place * size : start + (place + 1) * size]
            packs = [self._composition[pack] for pack in mine]
            micro_batches.append((*packs, *[()] * (size - len(packs))))
        return micro_batches

    def report(self, report: DataReport) -> DataReport:
        """Add what packing made of the sequences to a data set's report."""
        update = {"packs": self.packs_per_epoch, "fill_ratio": round(self.fill_ratio, 4)}
        return report.model_copy(update=update)

    def _pack_ids(self, step: int) -> IntArray:
        """Return the packs of one step as rows of the composition; they may span two epochs.

        Raises:
            IndexError: the run has no such step.
        """
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} is not one of the run's {self.total_steps} steps")
        first = step * self._global_batch_size
        positions = np.arange(first, min(first + self._global_batch_size, self._total_packs))
        epochs, places = np.divmod(positions, self.packs_per_epoch)
        pack_ids = np.empty(len(positions), dtype=np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            order = _permutation(self._order_key, epoch, self.packs_per_epoch)
            pack_ids[epochs == epoch] = order[places[epochs == epoch]]
        return pack_ids


def _total_packs(
    packs_per_epoch: int, global_batch_size: int, epochs: float | None, max_steps: int | None
) -> int:
    if max_steps is not None:
        return max_steps * global_batch_size
    assert epochs is not None
    # 0.1 + 0.2 epochs of 10 packs are 3 packs, not 4: binary fractions must not add one.
    return max(1, math.ceil(round(epochs * packs_per_epoch, 6)))


def _plan_fingerprint(
    order_key: str, max_seq_len: int, packing: bool, global_batch_size: int
) -> str:
    settings = f"1:{order_key}:{max_seq_len if packing else 0}:{packing}:{global_batch_size}"
    return hashlib.sha256(settings.encode()).hexdigest()


@lru_cache(maxsize=4)
def _permutation(order_key: str, epoch: int, size: int) -> IntArray:
    """Return the order of one epoch.

    Sorting raw Philox words, which numpy never changes, instead of `Generator.permutation`, which
    it may: a checkpoint must mean the same data under another numpy.
    """
    digest = hashlib.sha256(f"{order_key}:{epoch}".encode()).digest()
    words = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8")).random_raw(size)
    order = np.argsort(words, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order

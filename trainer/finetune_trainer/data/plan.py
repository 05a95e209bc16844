"""Assign packs to optimizer steps as a pure function of (seed, data set, step).

Every rank builds the same plan and can look up any step. Resuming therefore skips no data, the
number of label tokens of a step needs no collective, and a run on another number of ranks keeps the
same global batches. With P packs per epoch and G packs per step, step `s` (counted from 0) owns
positions `s * G` to `(s + 1) * G - 1` of the infinite stream epoch 0, epoch 1, ... Each epoch
contains every sequence as often as its weight specifies, in a different order. Only the last step
of a run may be smaller.

Sequences are assigned to packs once per run, by best fit over a shuffle of all of them, so P is the
same for every epoch and a step can be computed without the previous steps. Sequences of one weight
are packed together. An epoch takes `weight` times their packs from an infinite stream that
reshuffles them on every pass. A row of weight 0.25 is seen once in four epochs, a row of weight 2
twice per epoch.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, Self

import numpy as np

from finetune_trainer.config import DataReport, TrainConfig, TrainingConfig
from finetune_trainer.data.packing import IntArray, Packs, best_fit, one_sequence_each
from finetune_trainer.data.sequences import TokenDataset

Pack = tuple[int, ...]
"""Sequence indices laid out one after another in a row of a batch; () is a row of padding."""

Share = tuple[int, int]
"""Number of packs of one weight, and how many of them an epoch takes."""

COMPOSITION_EPOCH = -1  # the shuffle before packing
# Length of a document at which attention, whose cost is quadratic, costs as much as the rest of the
# model: 12 times the width of the model, here of a model with some billions of parameters.
ATTENTION_PARITY = 32_768


@dataclass(frozen=True, eq=False)
class DataPlan:
    """The order of all packs of a run; created by `of`.

    Attributes:
        total_steps: Optimizer steps of the whole run.
        packs_per_epoch: P, the packs of an epoch, in which each sequence occurs `weight` times.
        fill_ratio: Share of a pack's positions that hold tokens.
        fingerprint: Hash of everything that determines the order. A checkpoint stores it, because a
            step number means the same data only under the same fingerprint. The number of ranks,
            the micro-batch and the length of the run are not included; they may change.
    """

    total_steps: int
    packs_per_epoch: int
    fill_ratio: float
    fingerprint: str
    _order_key: str
    _shares: tuple[Share, ...]
    _total_packs: int
    _global_batch_size: int
    _micro_batch_size: int
    _composition: Packs
    _pack_sums: IntArray  # (P, 3): tokens, rows, label tokens
    _pack_costs: IntArray
    _newest: "dict[int, _Step]" = field(default_factory=dict)  # the step that was last looked up

    @classmethod
    def of(cls, dataset: TokenDataset, config: TrainConfig) -> Self:
        """Build the plan of the run that `config` describes, in a second per million sequences.

        Epochs are rounded up to a whole pack. Without packing every sequence is a pack.
        """
        data, training = config.data, config.training
        capacity = data.max_seq_len if data.packing else None
        order_key = f"{training.seed}:{dataset.fingerprint}"
        composition, shares = _compose(dataset, order_key, capacity)
        packs_per_epoch = sum(drawn for _, drawn in shares)
        pack_tokens = composition.sums(dataset.lengths)
        total_packs = _total_packs(packs_per_epoch, training)
        lengths = dataset.lengths.astype(np.int64)
        samples = composition.sums(np.ones(len(lengths), dtype=np.int64))
        label_tokens = composition.sums(dataset.label_counts)
        batch = training.global_batch_size
        settings = f"1:{order_key}:{capacity or 0}:{data.packing}:{batch}"
        return cls(
            total_steps=math.ceil(total_packs / batch),
            packs_per_epoch=packs_per_epoch,
            fill_ratio=float(pack_tokens.sum()) / (len(composition) * data.max_seq_len),
            fingerprint=hashlib.sha256(settings.encode()).hexdigest(),
            _order_key=order_key,
            _shares=shares,
            _total_packs=total_packs,
            _global_batch_size=batch,
            _micro_batch_size=training.micro_batch_size,
            _composition=composition,
            _pack_sums=np.stack([pack_tokens, samples, label_tokens], axis=1),
            _pack_costs=composition.sums(lengths + lengths**2 // ATTENTION_PARITY),
        )

    def epoch(self, step: int) -> float:
        """Return the number of epochs completed after `step` optimizer steps."""
        return min(step * self._global_batch_size, self._total_packs) / self.packs_per_epoch

    def packs(self, step: int) -> tuple[Pack, ...]:
        """Return the packs of an optimizer step over all ranks; steps count from 0."""
        return tuple(self._composition[pack] for pack in self._step(step).pack_ids)

    def tokens(self, step: int) -> int:
        """Return the tokens of one step, without padding."""
        return self._step(step).tokens

    def samples(self, step: int) -> int:
        """Return the rows of one step, over all ranks."""
        return self._step(step).samples

    def label_tokens(self, step: int) -> int:
        """Return the predicted tokens of one step over all ranks, the divisor of its loss."""
        return self._step(step).label_tokens

    def rank_packs(self, step: int, rank: int, world_size: int) -> list[tuple[Pack, ...]]:
        """Return the micro-batches of one rank in one step, `micro_batch_size` packs each.

        Every rank gets the same number of micro-batches; empty packs fill the places of a smaller
        last step. Packs are sorted by descending cost, which gives little padding and puts the
        memory peak into the first micro-batch. In each round of one micro-batch per rank, the rank
        with the least work so far gets the most expensive one, so that all ranks take about equally
        long, also if they synchronise in every micro-batch.
        """
        pack_ids = self._step(step).pack_ids
        pack_ids = pack_ids[np.argsort(-self._pack_costs[pack_ids], kind="stable")]
        size = self._micro_batch_size
        work = np.zeros(world_size, dtype=np.int64)
        mine = []
        for start in range(0, len(pack_ids), world_size * size):
            taken = [pack_ids[start + place * size :][:size] for place in range(world_size)]
            by_work = np.argsort(work, kind="stable")
            work[by_work] += [int(self._pack_costs[packs].sum()) for packs in taken]
            packs = taken[by_work.tolist().index(rank)]
            mine.append((*(self._composition[pack] for pack in packs), *[()] * (size - len(packs))))
        return mine

    def report(self, report: DataReport) -> DataReport:
        """Add number and fill ratio of the packs to the report of a data set."""
        update = {"packs": self.packs_per_epoch, "fill_ratio": round(self.fill_ratio, 4)}
        return report.model_copy(update=update)

    def _step(self, step: int) -> "_Step":
        """Return one step, whose packs may span two epochs.

        Raises:
            IndexError: the step is outside of the run.
        """
        if (known := self._newest.get(step)) is not None:
            return known
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} is not one of the run's {self.total_steps} steps")
        first = step * self._global_batch_size
        end = min(first + self._global_batch_size, self._total_packs)
        order = partial(_epoch_order, self._order_key, shares=self._shares)
        pack_ids = _stream(order, self.packs_per_epoch, first, end)
        found = _Step(pack_ids, *self._pack_sums[pack_ids].sum(axis=0).tolist())
        self._newest.clear()
        self._newest[step] = found
        return found


class _Step(NamedTuple):
    """Packs of a step over all ranks, as rows of the composition, and their sums."""

    pack_ids: IntArray
    tokens: int
    samples: int
    label_tokens: int


def _compose(
    dataset: TokenDataset, order_key: str, capacity: int | None
) -> tuple[Packs, tuple[Share, ...]]:
    """Return all packs, grouped by weight; a `capacity` of None means no packing."""
    order = _permutation(order_key, COMPOSITION_EPOCH, len(dataset.lengths))
    parts, shares = [], []
    for weight in np.unique(dataset.weights):
        members = order[dataset.weights[order] == weight]
        if capacity is None:
            part = one_sequence_each(np.sort(members))
        else:
            part = best_fit(members, dataset.lengths, capacity)
        parts.append(part)
        shares.append((len(part), max(1, round(weight * len(part)))))
    return Packs.join(parts), tuple(shares)


def _total_packs(packs_per_epoch: int, training: TrainingConfig) -> int:
    if training.max_steps is not None:
        return training.max_steps * training.global_batch_size
    assert training.epochs is not None, "maxSteps or epochs is set"
    # 0.1 + 0.2 epochs of 10 packs are 3 packs, not 4: binary fractions must not add a pack.
    return max(1, math.ceil(round(training.epochs * packs_per_epoch, 6)))


def _stream(order: Callable[[int], IntArray], size: int, first: int, end: int) -> IntArray:
    """Return positions `first` to `end - 1` of the stream order(0), order(1), ..., `size` each."""
    rounds, places = np.divmod(np.arange(first, end), size)
    return np.concatenate(
        [order(turn)[places[rounds == turn]] for turn in range(int(rounds[0]), int(rounds[-1]) + 1)]
    )


@lru_cache(maxsize=4)
def _epoch_order(order_key: str, epoch: int, *, shares: tuple[Share, ...]) -> IntArray:
    """Return the packs of one epoch in training order."""
    chosen, first_pack = [], 0
    for size, drawn in shares:
        order = partial(_permutation, f"{order_key}:{first_pack}", size=size)
        packs = _stream(order, size, epoch * drawn, (epoch + 1) * drawn)
        chosen.append(first_pack + np.sort(packs))
        first_pack += size
    packs = np.concatenate(chosen)
    return packs[_permutation(order_key, epoch, len(packs))]


def _permutation(order_key: str, epoch: int, size: int) -> IntArray:
    """Return the numbers below `size` in the order of one epoch.

    Sorts raw Philox words, which are stable across numpy releases, instead of calling
    `Generator.permutation`, which may change: a checkpoint must mean the same data under another
    numpy.
    """
    digest = hashlib.sha256(f"{order_key}:{epoch}".encode()).digest()
    words = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8")).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64)

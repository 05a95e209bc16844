"""Choose length, batch size, epochs and learning rate for the rows of a new job. Pure.

`init` calls it, first with lengths alone and then with the counts of the trainer.
"""

import math
from dataclasses import dataclass

from finetune_operator.api.v1alpha1.method import MethodType
from finetune_trainer.config import DataFormat, Inspection

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
LONGEST_TEXT = 4096  # longer texts continue in the next sequence
FITTING_PERCENT = 99
ENOUGH_STEPS = 60  # a larger batch would leave too few updates
MIN_STEPS = 20
MAX_PACKS = 64
MAX_TOKENS = 262_144
EPOCHS = ((1_000, 3), (10_000, 2))  # below so many rows
MAX_EPOCHS = 10
WARMUP = ((50, 0.1), (1_000, 0.05))  # below so many steps
LEAST_WARMUP = 0.03
LEARNING_RATES = {MethodType.LORA: "2e-4", MethodType.QLORA: "2e-4", MethodType.FULL: "1e-5"}


@dataclass(frozen=True)
class Counts:
    """Rows and packs of a data set with one length of sequences.

    Attributes:
        rows: Rows to train on.
        held_out: Held-out rows.
        packs: Packs per epoch.
        long_rows: Rows that are longer than a sequence.
        is_exact: Whether the trainer has counted; otherwise they are estimated.
    """

    rows: int
    held_out: int
    packs: int
    long_rows: int
    is_exact: bool


@dataclass(frozen=True)
class Schedule:
    """The training of a new job.

    Attributes:
        batch: `globalBatchSize`.
        steps: Optimizer steps of the whole run.
    """

    epochs: int
    batch: int
    steps: int
    warmup: float


def max_seq_length(found: Inspection) -> int:
    """Return the smallest length that holds 99 % of the rows, within the model's context."""
    wanted = found.lengths.percentiles[FITTING_PERCENT]
    largest = LONGEST_TEXT if found.format is DataFormat.TEXT else LENGTHS[-1]
    length = next((one for one in LENGTHS if one >= wanted), largest)
    return min(length, largest, found.context or largest)


def longer(length: int, found: Inspection) -> int | None:
    """Return the next length; None if there is none within the model's context."""
    largest = LONGEST_TEXT if found.format is DataFormat.TEXT else LENGTHS[-1]
    following = next((one for one in LENGTHS if one > length), length)
    chosen = min(following, largest, found.context or largest)
    return chosen if chosen > length else None


def splits_rows(found: Inspection, length: int) -> bool:
    """Whether rows are split: texts, some of which are longer than a sequence."""
    return found.format is DataFormat.TEXT and found.lengths.percentiles[-1] > length


def estimated(found: Inspection, length: int) -> Counts:
    """Return counts that follow from the lengths of the rows."""
    percentiles, total = found.lengths.percentiles, found.total_rows
    held_out = round(total * found.held_out_rows / found.rows)
    cut = [min(one, length) for one in percentiles]
    is_split = splits_rows(found, length)
    mean = found.lengths.mean if is_split else sum(cut) / len(cut)
    long_percent = sum(one > length for one in percentiles[1:])
    rows = total - held_out
    per_row = mean / length
    if not is_split:
        per_row = max(per_row, _packs_per_row(cut, length))
    packs = max(1, math.ceil(rows * per_row))
    return Counts(rows, held_out, packs, round(total * long_percent / 100), is_exact=False)


def _packs_per_row(lengths: list[int], capacity: int) -> float:
    """Return the packs per row if rows of these lengths are packed, the longest first."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((at for at, free in enumerate(room) if free >= length), None)
        if place is None:
            room.append(capacity - length)
        else:
            room[place] -= length
    return (len(room) - 1) / len(lengths)  # the last pack is rarely full


def schedule_of(counts: Counts, ranks: int, length: int) -> Schedule:
    """Return epochs and batch size for at least 20 optimizer steps, if possible.

    The batch is the largest power of two times the ranks that leaves 60 steps, up to 64 packs and
    262,144 tokens. If the smallest batch leaves fewer than 20, there are more epochs, up to 10.
    """
    epochs = next((count for below, count in EPOCHS if counts.rows < below), 1)
    batch = ranks
    largest = max(ranks, min(MAX_PACKS, MAX_TOKENS // length))
    while 2 * batch <= largest and _steps(counts, epochs, 2 * batch) >= ENOUGH_STEPS:
        batch *= 2
    while epochs < MAX_EPOCHS and _steps(counts, epochs, batch) < MIN_STEPS:
        epochs += 1
    steps = _steps(counts, epochs, batch)
    warmup = next((share for below, share in WARMUP if steps < below), LEAST_WARMUP)
    return Schedule(epochs, batch, steps, warmup)


def _steps(counts: Counts, epochs: int, batch: int) -> int:
    return math.ceil(epochs * counts.packs / batch)

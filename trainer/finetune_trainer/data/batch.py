"""Turn packs into tensors for one forward pass.

The loop calls it for each micro-batch. Only `position_ids` that restart at 0 separate the documents
of a row. The model must be called with `use_cache=False` and without an attention mask, because a
cache or a mask would silently let documents attend to each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from finetune_trainer.data.plan import Pack
from finetune_trainer.data.sequences import TokenDataset

if TYPE_CHECKING:
    import torch

NO_TARGET = -100
MIN_LENGTH = 2  # a row of one position has no target, and some models refuse it


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Tensors of a forward pass of one rank, on the CPU.

    Attributes:
        input_ids: (B, T) int64.
        position_ids: (B, T) int64; 0 begins a document. Padding forms separate documents, none of
            them longer than the longest document of the batch, because a position table may end
            there.
        targets: (B, T) int64, the token that position t must predict (already shifted); -100 if
            the position has no target.
        cu_seq_lens: (N + 1,) int32, start of each of the N documents of the flattened batch, and
            its end. Padding counts as documents; no document continues in the next row.
        max_length: Length of the longest document, at least 2.
        label_positions: (K,) int64, positions of the flattened batch that have a target.
        tokens: Number of positions that are not padding.
    """

    input_ids: "torch.Tensor"
    position_ids: "torch.Tensor"
    targets: "torch.Tensor"
    cu_seq_lens: "torch.Tensor"
    max_length: int
    label_positions: "torch.Tensor"
    tokens: int

    @classmethod
    def of(
        cls,
        input_ids: "torch.Tensor",
        position_ids: "torch.Tensor",
        targets: "torch.Tensor",
        *,
        tokens: int,
    ) -> "MicroBatch":
        """Compute bounds and labels of (B, T) tensors on the CPU; a GPU would synchronise."""
        begins = (position_ids == 0).flatten().nonzero().flatten()
        cu_seq_lens = begins.new_empty(len(begins) + 1)
        cu_seq_lens[:-1], cu_seq_lens[-1] = begins, position_ids.numel()
        return cls(
            input_ids,
            position_ids,
            targets,
            cu_seq_lens=cu_seq_lens.int(),
            # A length of 1 would be compiled separately.
            max_length=max(MIN_LENGTH, int(cu_seq_lens.diff().max())),
            label_positions=(targets != NO_TARGET).flatten().nonzero().flatten(),
            tokens=tokens,
        )

    @property
    def label_tokens(self) -> int:
        """Number of positions that have a target."""
        return len(self.label_positions)


def collate(
    dataset: TokenDataset, packs: Sequence[Pack], *, pad_to: int | None, pad_id: int
) -> MicroBatch:
    """Lay out one pack per row: B = len(packs), T = `pad_to`, or the longest pack if None.

    The first token of a document is never the target of the previous document. Empty packs give
    rows of padding, so a rank without data still takes part in the step.

    Raises:
        ValueError: `packs` is empty, or a pack is longer than `pad_to`.
    """
    import torch

    if not packs:
        raise ValueError("a micro-batch needs at least one pack; an empty one is ()")
    num_tokens = [int(dataset.lengths[list(pack)].sum()) for pack in packs]
    width = max(MIN_LENGTH, *num_tokens) if pad_to is None else pad_to
    if max(num_tokens) > width:
        raise ValueError(f"a pack of {max(num_tokens)} tokens is longer than pad_to {width}")
    shape = (len(packs), width)
    longest = max((int(dataset.lengths[index]) for pack in packs for index in pack), default=0)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    targets = np.full(shape, NO_TARGET, dtype=np.int64)
    for row, pack in enumerate(packs):
        start = 0
        for index in pack:
            sequence = dataset.row(index)
            end = start + len(sequence.tokens)
            input_ids[row, start:end] = sequence.tokens
            position_ids[row, start:end] = np.arange(end - start)
            targets[row, start : end - 1] = np.where(
                sequence.is_label[1:], sequence.tokens[1:], NO_TARGET
            )
            start = end
        position_ids[row, start:] = np.arange(width - start) % max(MIN_LENGTH, longest)
    return MicroBatch.of(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(targets),
        tokens=sum(num_tokens),
    )


def eval_batches(
    dataset: TokenDataset,
    *,
    max_tokens_per_batch: int,
    rank: int,
    world_size: int,
    pad_id: int = 0,
    round_to: int = 1,
) -> Iterator[MicroBatch]:
    """Yield every sequence once over all ranks, in a fixed order that needs little padding.

    Sequences are sorted from long to short, one per row, and neighbours go to different ranks. A
    batch holds at most `max_tokens_per_batch` positions including padding (more only if a single
    sequence is longer). Every rank yields the same number of batches, which collectives inside the
    forward pass require; rows without a sequence are empty.

    With `round_to` above 1 there are few shapes, the same on every rank: T is a multiple of
    `round_to`, and B is the number of rows that fit, also in the last batch of a T. With 1, padding
    and arithmetic are minimal.
    """
    order = np.argsort(-dataset.lengths.astype(np.int64), kind="stable")
    num_rows = -(-len(order) // world_size)
    start = 0
    while start < num_rows:
        longest = max(MIN_LENGTH, int(dataset.lengths[order[start * world_size]]))
        width = -(-longest // round_to) * round_to
        end = start + max(1, max_tokens_per_batch // width)
        if round_to == 1:
            end = min(num_rows, end)
        mine = [row * world_size + rank for row in range(start, end)]
        packs = [(int(order[place]),) if place < len(order) else () for place in mine]
        yield collate(dataset, packs, pad_to=width if round_to > 1 else None, pad_id=pad_id)
        start = end

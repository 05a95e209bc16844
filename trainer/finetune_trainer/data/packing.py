"""Combine sequences into packs that fill a fixed number of positions.

Only the data plan calls it. The algorithm is best fit: each sequence, in the given order, goes into
the open pack that it fills best. The order must be shuffled. Sorting by length first would fill the
packs slightly better, but packs of equally long, and so similar, rows cost quality.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packs:
    """An assignment of sequences to packs.

    Attributes:
        members: (N,) sequence indices, pack after pack.
        starts: (P + 1,) index in `members` at which each pack begins; the last entry is N.
    """

    members: IntArray
    starts: IntArray

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """Return the packs of all parts in order."""
        sizes = np.concatenate([np.diff(part.starts) for part in parts])
        members = np.concatenate([part.members for part in parts])
        return cls(members, np.concatenate([[0], np.cumsum(sizes)]))

    def __len__(self) -> int:
        """Return P, the number of packs."""
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> tuple[int, ...]:
        """Return the sequence indices of one pack, in the order they are laid out."""
        return tuple(self.members[self.starts[pack] : self.starts[pack + 1]].tolist())

    def sums(self, values: npt.NDArray[np.integer[Any]]) -> IntArray:
        """Sum `values` (N,), one per sequence, over each pack: (P,)."""
        return np.add.reduceat(values[self.members].astype(np.int64), self.starts[:-1])


def one_sequence_each(sequences: IntArray) -> Packs:
    """Return packs of one sequence each, for runs without packing."""
    return Packs(sequences, np.arange(len(sequences) + 1))


def best_fit(order: IntArray, lengths: npt.NDArray[np.int32], capacity: int) -> Packs:
    """Pack the sequences named by `order` into packs of at most `capacity` tokens.

    Open packs are found by their remaining room: bit `r` of one large integer is set if a pack with
    room for exactly `r` tokens is open, so the best fit for `n` tokens is the lowest set bit at or
    above `n`. A sequence takes a handful of word operations regardless of the number of packs.

    Raises:
        ValueError: a sequence is longer than `capacity`.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        raise ValueError(f"a sequence of {int(lengths.max())} tokens is longer than {capacity}")
    pack_of = np.empty(len(order), dtype=np.int64)
    open_packs: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms, num_packs = 0, 0
    for position, length in enumerate(lengths[order].tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            stack = open_packs[room]
            pack = stack.pop()
            if not stack:
                rooms ^= 1 << room
        else:
            room, pack = capacity, num_packs
            num_packs += 1
        pack_of[position] = pack
        left = room - length
        if left:
            if not open_packs[left]:
                rooms |= 1 << left
            open_packs[left].append(pack)
    starts = np.zeros(num_packs + 1, dtype=np.int64)
    np.cumsum(np.bincount(pack_of, minlength=num_packs), out=starts[1:])
    return Packs(order[np.argsort(pack_of, kind="stable")], starts)

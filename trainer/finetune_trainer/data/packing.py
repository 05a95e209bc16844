"""Put sequences together into packs that fill a fixed number of positions.

Called by the data plan alone. Best fit over the sequences in the order given: each goes into the
open pack that it fills best. The order must be shuffled. Sorting by length first would fill the
packs a little better, but makes packs of equally long, and so similar, rows, and that costs
quality.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packs:
    """Which sequences share a pack.

    Attributes:
        members: (N,) sequence indices, pack after pack.
        starts: (P + 1,) where each pack begins in `members`; the last entry is N.
    """

    members: IntArray
    starts: IntArray

    @classmethod
    def join(cls, parts: list[Self]) -> Self:
        """Return the packs of all parts, one part after the other."""
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
        """Add up `values` (N,), one a sequence, over each pack: (P,)."""
        return np.add.reduceat(values[self.members].astype(np.int64), self.starts[:-1])


def one_sequence_each(sequences: IntArray) -> Packs:
    """Return packs that hold one sequence each: no packing."""
    return Packs(sequences, np.arange(len(sequences) + 1))


def best_fit(order: IntArray, lengths: npt.NDArray[np.int32], capacity: int) -> Packs:
    """Pack the sequences named by `order` into packs of at most `capacity` tokens.

    The open packs are found by the room left in them: bit `r` of one large integer says that a
    pack with room for exactly `r` tokens is open, so the best fit for `n` tokens is the lowest bit
    at or above `n`. That is a handful of word operations a sequence whatever the number of packs.

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

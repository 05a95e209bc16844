"""Divide a state among the ranks that hold the same tensors, so that each is copied once.

The store calls it before it copies a state to host memory. Under DDP every rank holds the whole
state, and under FSDP with replicas every shard has several holders. DCP chooses a
single writer per tensor, but only after all holders have copied it.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, Any]


def own_part(state: State, rank: int, world_size: int) -> State:
    """Return the sections of `state` with only those tensors that this rank writes.

    All ranks compute the same division: the largest tensor goes first, to the rank with the fewest
    bytes. So a rank gets at most an equal share and one tensor. Other values stay on every rank.

    Args:
        state: Nested dictionaries of tensors; the names, shapes and dtypes are the same on every
            rank. Tensors that are not a DTensor are replicated.
        rank: Rank of this process.
        world_size: Number of ranks.
    """
    tensors = sorted(_tensors_in(state), key=lambda item: (-_nbytes(item[1]), item[0]))
    loads: dict[int, list[int]] = {}  # by number of holders, the bytes of each
    others = set()
    for path, tensor in tensors:
        holder, holders = _holder_of(tensor, rank, world_size)
        load = loads.setdefault(holders, [0] * holders)
        writer = load.index(min(load))
        load[writer] += _nbytes(tensor)
        if writer != holder:
            others.add(path)
    part: State = _without(state, others, ())
    return part


def _holder_of(tensor: "Tensor", rank: int, world_size: int) -> tuple[int, int]:
    """Return this rank's number among the ranks with the same data, and the number of them."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return rank, world_size
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return 0, 1
    number, count = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(dimension)
            number, count = number * size + coordinate[dimension], count * size
    return number, count


def _nbytes(tensor: "Tensor") -> int:
    """Return the bytes of the whole tensor, the same on every rank."""
    return math.prod(tensor.shape) * tensor.element_size()


def _tensors_in(
    value: Any, path: tuple[Any, ...] = ()
) -> "Iterator[tuple[tuple[Any, ...], Tensor]]":
    import torch

    if isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors_in(part, (*path, key))
    elif isinstance(value, torch.Tensor):
        yield path, value


def _without(value: Any, paths: set[tuple[Any, ...]], path: tuple[Any, ...]) -> Any:
    """Return dictionaries without the values at `paths`; DCP would store an emptied dictionary."""
    if not isinstance(value, dict):
        return value
    parts = {
        key: _without(part, paths, (*path, key))
        for key, part in value.items()
        if (*path, key) not in paths
    }
    return {key: part for key, part in parts.items() if part != {} or value[key] == {}}

"""List the collectives that Python code calls on a process group, and compute their sizes.

`torch.distributed` and all libraries above it call these methods of torch's `ProcessGroup`. Sizes
are counted as in `sample`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BARRIER = "barrier"  # has a sequence number but no size

Size = Callable[..., int]
"""Function that computes the size from the number of ranks and the arguments of the method."""


def _all(tensors: "Iterable[Tensor]") -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _first_list(num_ranks: int, tensors: "list[Tensor]", *rest: Any) -> int:
    return tensors[0].nbytes if len(tensors) == 1 else _all(tensors)


def _second_list(num_ranks: int, outputs: Any, inputs: "list[Tensor]", *rest: Any) -> int:
    return _all(inputs)


def _shards_of_first(num_ranks: int, shards: "list[Tensor]", *rest: Any) -> int:
    return num_ranks * _all(shards)


def _shards_of_second(num_ranks: int, outputs: Any, shards: "list[Tensor]", *rest: Any) -> int:
    return num_ranks * _all(shards)


def _first(num_ranks: int, whole: "Tensor", *rest: Any) -> int:
    return whole.nbytes


def _second(num_ranks: int, output: Any, whole: "Tensor", *rest: Any) -> int:
    return whole.nbytes


METHODS: dict[str, tuple[str, Size]] = {
    "allreduce": ("all_reduce", _first_list),
    "allreduce_coalesced": ("all_reduce", _first_list),
    "broadcast": ("broadcast", _first_list),
    "reduce": ("reduce", _first_list),
    "all_gather_single": ("all_gather", _first),
    "all_gather_single_coalesced": ("all_gather", _first_list),
    "allgather": ("all_gather", _shards_of_second),
    "allgather_coalesced": ("all_gather", _shards_of_second),
    "reduce_scatter": ("reduce_scatter", _shards_of_first),
    "reduce_scatter_single": ("reduce_scatter", _second),
    "reduce_scatter_single_coalesced": ("reduce_scatter", _second_list),
    "gather": ("gather", _shards_of_second),
    "scatter": ("scatter", _shards_of_first),
    "alltoall": ("all_to_all", _second_list),
    "all_to_all_single": ("all_to_all", _second),
    "barrier": (BARRIER, lambda num_ranks, *rest: 0),
}
"""Operation and size function by the method's name."""

"""A finished collective, its size class and its bus bandwidth factor.

Sizes follow nccl-tests: the whole tensor for all_reduce, broadcast and reduce; the shards of all
ranks together for the others.
"""

from dataclasses import dataclass

from finetune_trainer.config.metrics import SIZE_CLASSES

_MEDIUM_BYTES = 1 << 20
_LARGE_BYTES = 32 << 20
_SMALL, _MEDIUM, _LARGE = SIZE_CLASSES


@dataclass(frozen=True)
class Sample:
    """A finished collective.

    Attributes:
        op: A value of `metrics.COLLECTIVE_OPS`.
        group: A value of `metrics.GROUPS`.
        num_ranks: Size of the group.
        num_bytes: Size as this module counts it.
        seconds: From start to end; None if not known.
    """

    op: str
    group: str
    num_ranks: int
    num_bytes: int
    seconds: float | None = None


def size_class(num_bytes: int) -> str:
    """Return the class from `metrics.SIZE_CLASSES`: below 1 MiB, below 32 MiB, or larger."""
    if num_bytes < _MEDIUM_BYTES:
        return _SMALL
    return _MEDIUM if num_bytes < _LARGE_BYTES else _LARGE


def bus_factor(op: str, num_ranks: int) -> float:
    """Return the ratio of bus bytes per rank to the size of the collective.

    From nccl-tests, doc/PERFORMANCE.md: it makes the bandwidths of operations comparable with each
    other and with the hardware's.
    """
    if op == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if op in ("broadcast", "reduce"):
        return 1.0
    return (num_ranks - 1) / num_ranks

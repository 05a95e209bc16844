"""What is known of one collective, and what follows from its size.

Sizes are those of nccl-tests: the whole tensor for all_reduce, broadcast and reduce; the shards of
all ranks together for the others.
"""

from dataclasses import dataclass

from finetune_trainer.config.metrics import SIZE_CLASSES

_MEDIUM_BYTES = 1 << 20
_LARGE_BYTES = 32 << 20
_SMALL, _MEDIUM, _LARGE = SIZE_CLASSES


@dataclass(frozen=True)
class Sample:
    """One collective that is over.

    Attributes:
        op: one of `metrics.COLLECTIVE_OPS`.
        group: one of `metrics.GROUPS`.
        num_ranks: of the group.
        num_bytes: as this module counts them.
        seconds: from its start to its end; None where nobody knows.
    """

    op: str
    group: str
    num_ranks: int
    num_bytes: int
    seconds: float | None = None


def size_class(num_bytes: int) -> str:
    """Return one of `metrics.SIZE_CLASSES`: below 1 MiB, below 32 MiB, or larger."""
    if num_bytes < _MEDIUM_BYTES:
        return _SMALL
    return _MEDIUM if num_bytes < _LARGE_BYTES else _LARGE


def bus_factor(op: str, num_ranks: int) -> float:
    """Return the bytes that the links of one rank carry at best, by the size of the collective.

    From nccl-tests, doc/PERFORMANCE.md: so bandwidths of operations can be compared with each
    other and with the hardware's.
    """
    if op == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if op in ("broadcast", "reduce"):
        return 1.0
    return (num_ranks - 1) / num_ranks

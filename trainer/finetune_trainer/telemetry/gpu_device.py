"""A rank's GPU as telemetry sees it; this module does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuMemory:
    """Counters of torch's allocator since the process started, in bytes or in allocations."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    alloc_retries: int = 0
    ooms: int = 0


@dataclass(frozen=True)
class Gpu:
    """A single GPU.

    Attributes:
        model: Name as reported by the driver.
        uuid: UUID as in nvidia-smi and NVML, the join key of other GPU metrics.
        nccl: Version of the NCCL library.
        memory: Reads the memory counters; takes about 100 microseconds.
    """

    model: str
    uuid: str
    nccl: str
    memory: Callable[[], GpuMemory]

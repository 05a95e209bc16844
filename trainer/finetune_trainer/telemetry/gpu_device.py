"""A rank's GPU as telemetry knows it, which imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuMemory:
    """What torch's allocator counts, in bytes and in allocations since the process began."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    alloc_retries: int = 0
    ooms: int = 0


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        model: its name, as the driver gives it.
        uuid: as nvidia-smi and NVML give it, which other metrics of it are joined by.
        nccl: version of the library.
        memory: reads its memory; takes some 100 microseconds.
    """

    model: str
    uuid: str
    nccl: str
    memory: Callable[[], GpuMemory]

"""Describe a rank's GPU to telemetry: its identity, the time of its work, its memory.

Only `free_memory` waits for the device. For a CPU the functions return None.
"""

from pathlib import Path
from typing import Any

import torch

from finetune_trainer.telemetry import Gpu, GpuMemory
from finetune_trainer.telemetry.phases import DeviceClock


class CudaClock:
    """Clock of a GPU's current stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event in the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Return the time between two finished events."""
        milliseconds: float = earlier.elapsed_time(later)
        return milliseconds / 1000


def device_clock(device: torch.device) -> DeviceClock | None:
    """Return the clock of `device`; None for a CPU, where the host does the computation."""
    return CudaClock() if device.type == "cuda" else None


def is_on_gpu(values: torch.Tensor) -> bool:
    """Whether the host would have to wait for `values`."""
    return values.is_cuda


def begin_copy(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Start to copy `values` to the host; the copy is complete when the event has finished."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived


def free_memory(device: torch.device) -> int:
    """Return the free bytes, including those cached by torch's allocator.

    After training the cache takes most of a GPU's memory. It is released, which waits for the
    device.
    """
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def write_memory_snapshot(path: Path) -> bool:
    """Write the segments and live blocks of torch's allocator, and return whether there are any.

    https://pytorch.org/memory_viz shows the file.

    Raises:
        OSError: the file cannot be written.
    """
    if not torch.cuda.is_initialized():
        return False
    torch.cuda.memory._dump_snapshot(str(path))
    return True


def find_gpu(device: torch.device) -> Gpu | None:
    """Return the description of `device` for telemetry; None for a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        model=properties.name,
        uuid=f"GPU-{properties.uuid}",
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        memory=lambda: _memory(device),
    )


def has_nvlink(device: torch.device) -> bool:
    """Return whether NVLink connects `device` to every other GPU of this machine."""
    import pynvml as nv

    def handle(index: int) -> Any:
        uuid = torch.cuda.get_device_properties(index).uuid
        return nv.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    own = device.index or 0
    others = [index for index in range(torch.cuda.device_count()) if index != own]
    try:
        nv.nvmlInit()
        return bool(others) and all(
            nv.nvmlDeviceGetP2PStatus(handle(own), handle(one), nv.NVML_P2P_CAPS_INDEX_NVLINK)
            == nv.NVML_P2P_STATUS_OK
            for one in others
        )
    except nv.NVMLError:  # no library, or a MIG slice
        return False


def _memory(device: torch.device) -> GpuMemory:
    """Return the allocator's counters."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return GpuMemory(
        allocated=stats["allocated_bytes"]["all"]["current"],
        reserved=stats["reserved_bytes"]["all"]["current"],
        peak_allocated=stats["allocated_bytes"]["all"]["peak"],
        alloc_retries=stats["num_alloc_retries"],
        ooms=stats["num_ooms"],
    )

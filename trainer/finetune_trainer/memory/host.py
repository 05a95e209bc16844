"""Check that pinned host memory is available before it is allocated, because it cannot be swapped.

The checkpoint store checks its staging copies, and FSDP its offloaded parameters. The kernel kills
a container at its cgroup's limit without a message, long before the node runs out of memory.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_trainer.errors import ConfigError
from finetune_trainer.sizing.host import pinned_nbytes

if TYPE_CHECKING:
    from torch import Tensor

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # new and old name
_GIB = 2**30


def free_host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes available to this process: free on the node and within the cgroup's limit.

    Inactive file cache counts as free, because the kernel reclaims it.
    """
    free = _meminfo(proc)["MemAvailable"]
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        stat = (cgroup / limit).parent / "memory.stat"
        if not (cgroup / limit).is_file() or not (cgroup / used).is_file():
            continue  # the root of cgroup 2 has no limit
        most = (cgroup / limit).read_text().strip()
        if most == "max":
            continue
        counted = dict(line.split() for line in stat.read_text().splitlines())
        taken = int((cgroup / used).read_text()) - int(counted.get(cached, 0))
        free = min(free, max(0, int(most) - taken))
    return free


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of the node's memory and swap, or the cgroup's limit if it is lower."""
    node = _meminfo(proc)
    total = node["MemTotal"] + node.get("SwapTotal", 0)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        most = (cgroup / limit).read_text().strip() if (cgroup / limit).is_file() else "max"
        total = total if most == "max" else min(total, int(most))
    return total


def _meminfo(proc: Path) -> dict[str, int]:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return {words[0].removesuffix(":"): 1024 * int(words[1]) for words in lines}


def pinned_size(state: dict[str, Any], device: str = "cuda") -> int:
    """Return the bytes of this rank's part of `state` that are copied into pinned memory.

    These are the tensors on `device`; tensors in host memory are copied into pageable memory.
    """
    from torch.distributed.tensor import DTensor

    settings = allocator_settings()
    total = 0
    for tensor in _tensors_in(state):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == device:
            total += pinned_nbytes(local.numel() * local.element_size(), settings)
    return total


def allocator_settings() -> str:
    """Return the settings that torch's allocator reads from the environment."""
    return next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), "")


def refuse_pinning(size: int, ranks_on_node: int, free: int, what: str) -> None:
    """Refuse to pin `size` bytes for each rank of a node if the node has less free memory.

    Raises:
        ConfigError: the message states the requested and the free memory, and remedies.
    """
    needed = size * ranks_on_node
    if needed <= free:
        return
    advice = (
        "spec.checkpoint.enabled false" if "checkpoint" in what else "spec.strategy.offload none"
    )
    raise ConfigError(
        f"spec.resources: {what} takes {_gib(needed)} of pinned host memory on each node "
        f"({ranks_on_node} ranks x {_gib(size)}), of which {_gib(free)} are free within the limit "
        "of the container; use nodes or limits with more memory, more nodes with a strategy that "
        f"shards, or {advice}"
    )


def _tensors_in(value: Any) -> "Iterator[Tensor]":
    import torch

    if isinstance(value, dict):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, torch.Tensor):
        yield value


def _gib(size: int) -> str:
    return f"{math.ceil(10 * size / _GIB) / 10} GiB"

"""Choose the device and the precision in which the models fit into memory, before they are loaded.

`models` calls it. The bytes are computed from the headers of the weight files.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetune_trainer.errors import ConfigError
from finetune_trainer.memory.host import free_host_memory

Precision = Literal["bf16", "fp16", "fp32", "fp64"]
_ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
_FLOATS = ("F8", "F16", "BF16", "F32", "F64")
_QUANTISED_BYTES = {"nf4": 0.6, "int8": 1.1}  # of a weight, with scales
_USABLE = 0.9
"""Share of the free memory that weights may take; activations and caches need the rest."""
_GIB = 2**30


@dataclass(frozen=True)
class Weights:
    """The weight files of one model, and how its floats are quantised when they are loaded."""

    files: Sequence[Path]
    quantization: str = "none"

    def num_bytes(self, precision: Precision) -> int:
        """Return the bytes of the loaded weights, at least."""
        item = _QUANTISED_BYTES.get(self.quantization, _ITEM_BYTES[precision])
        sizes = (size for file in self.files for size in _sizes(file))
        return int(sum(count * item if is_float else stored for count, stored, is_float in sizes))


@dataclass(frozen=True)
class Place:
    """A device, and the precision of the weights there."""

    device: Literal["cuda", "cpu"]
    precision: Precision


def choose_place(
    weights: Sequence[Weights],
    precision: Precision | None,
    *,
    gpu_bytes: int | None,
    host_bytes: int,
) -> Place:
    """Return the first place that fits: GPU before host, and each first without rounding to bf16.

    Args:
        weights: The models to load.
        precision: Precision of the run; by default bf16 on a GPU, and fp32 on a CPU.
        gpu_bytes: Free bytes of the GPU; None without a GPU.
        host_bytes: Free bytes of the host.

    Raises:
        ConfigError: the weights fit nowhere.
    """
    places = [Place("cpu", precision or "fp32"), Place("cpu", "bf16")]
    if gpu_bytes is not None:
        places[:0] = [Place("cuda", precision or "bf16"), Place("cuda", "bf16")]
    free = {"cuda": gpu_bytes or 0, "cpu": host_bytes}
    for place in places:
        needed = sum(one.num_bytes(place.precision) for one in weights)
        if needed <= free[place.device] * _USABLE:
            return place
    remedy = "end other programs, or use a machine with more memory"
    if len(weights) > 1:
        remedy += "; --only base or --only trained loads one model instead of two"
    raise ConfigError(
        f"the weights need {needed / _GIB:.1f} GiB in bf16, and {host_bytes / _GIB:.1f} GiB of "
        f"memory are free; {remedy}"
    )


def free_memory() -> int:
    """Return the free bytes of this host."""
    if sys.platform == "linux":
        return free_host_memory()
    import psutil

    return int(psutil.virtual_memory().available)


def free_gpu_memory() -> int | None:
    """Return the free bytes of the GPU; None without one."""
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def _sizes(file: Path) -> Iterator[tuple[int, int, bool]]:
    """Yield numbers, bytes and whether they are floats, for each tensor of a safetensors file."""
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            is_float = tensor["dtype"].startswith(_FLOATS)
            yield math.prod(tensor["shape"]), end - begin, is_float

"""Read the memory of this machine's GPUs with `nvidia-smi`, because torch is not imported here.

The local backend calls it to forecast whether a job fits.
"""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from finetune_operator.backends.local.render import visible_gpus
from finetune_operator.planner.catalogue import GpuSize, size_with

_PROGRAM = "nvidia-smi"
_FIELDS = "memory.total,memory.reserved,compute_cap,mig.mode.current,name"
_TIMEOUT_SECONDS = 10
_MIB_PER_GIB = 1024


@dataclass(frozen=True)
class _Gpu:
    name: str
    usable_gib: float
    capability: tuple[int, int]


def size_here(wanted: int, environ: Mapping[str, str]) -> GpuSize | None:
    """Return the GPUs of this machine as a size with the memory of the smallest GPU.

    Args:
        wanted: GPUs of the job. If the GPUs differ and the job uses a part of them, this process
            does not know which ones torch would choose.
        environ: Environment of the trainer.

    Returns:
        None if there are fewer GPUs, or their memory is not known.
    """
    program = shutil.which(_PROGRAM, path=environ.get("PATH", ""))
    gpus = _gpus(program) if program else []
    visible = visible_gpus(environ)
    count = len(gpus) if visible is None else min(len(gpus), len(visible))
    kinds = {(gpu.name, round(gpu.usable_gib)) for gpu in gpus}
    if program is None or wanted > count or (len(kinds) > 1 and wanted < len(gpus)):
        return None
    smallest = min(gpus, key=lambda gpu: gpu.usable_gib)
    return replace(
        size_with(smallest.usable_gib),
        name="this machine",
        gpu=smallest.name,
        gpus=count,
        capability=smallest.capability,
        # A stand-in for the bandwidth: without a peak rate there is no forecast of speed.
        nvlink_gb_per_second=float(count > 1 and _has_nvlink(program, len(gpus))),
    )


def _gpus(program: str) -> list[_Gpu]:
    """Return the GPUs of this machine; empty if the memory of any of them is not known."""
    lines = _output(program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    try:
        return [_gpu(line) for line in lines.splitlines()]
    except ValueError:  # [N/A], 0, or MIG
        return []


def _gpu(line: str) -> _Gpu:
    total, reserved, capability, mig, name = line.split(", ", 4)
    if mig == "Enabled":
        raise ValueError("the memory of a MIG slice is not known")
    major, minor = capability.split(".")
    # torch's total memory does not contain the part that the driver reserves.
    usable = (int(total) - int(reserved)) / _MIB_PER_GIB
    if usable <= 0:
        raise ValueError("the driver does not know the memory")
    return _Gpu(name, usable, (int(major), int(minor)))


def _has_nvlink(program: str, count: int) -> bool:
    """Return whether NVLink connects each GPU to all others."""
    lines = map(str.split, _output(program, "topo", "-p2p", "n").splitlines())
    rows = [words for words in lines if "X" in words and words[0].startswith("GPU")]
    return len(rows) == count and all({*row[1:]} == {"X", "OK"} for row in rows)


@cache
def _output(program: str, *arguments: str) -> str:
    """Return the output of `nvidia-smi`; empty if it fails.

    The local operator needs it in each reconcile. Without persistence mode a call loads the driver,
    which takes seconds.
    """
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout

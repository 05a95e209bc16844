"""An `nvidia-smi` that shows the GPUs of a table, for machines without a GPU."""

from collections.abc import Sequence
from pathlib import Path

H100 = "81559, 551, 9.0, Disabled, NVIDIA H100 80GB HBM3"
"""Memory in MiB, the part of the driver, compute capability, MIG and name; 79.1 GiB are usable."""
T4 = "15360, 456, 7.5, [N/A], Tesla T4"


def fake_nvidia_smi(folder: Path, rows: Sequence[str], *, has_nvlink: bool = False) -> str:
    """Write the program into a new folder, and return the PATH with this folder alone.

    Args:
        folder: Parent of the new folder.
        rows: The GPUs, as `--query-gpu` prints them; without any, the program fails.
        has_nvlink: Whether NVLink connects all GPUs.
    """
    other = "OK" if has_nvlink else "NS"
    names = [f"GPU{number}" for number in range(len(rows))]
    links = [["", *names]]
    links += [[f" {one}", *("X" if one == name else other for name in names)] for one in names]
    shown = ["\t".join(words) for words in links]
    shown += ["", "Legend:", "", "  X    = Self", "  OK   = Status Ok", "  NS   = Not supported"]
    table, matrix = "\n".join(rows), "\n".join(shown)
    programs = folder / "programs"
    programs.mkdir()
    program = programs / "nvidia-smi"
    failure = "echo 'Driver/library version mismatch'; exit 18"
    query = f"echo '{table}'" if rows else failure
    topology = f"if [ $1 = topo ]; then echo '{matrix}'; exit; fi"
    program.write_text(f"#!/bin/sh\n{topology}\n{query}\n")
    program.chmod(0o755)
    return str(programs)

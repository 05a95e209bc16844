"""What the kernel says of a process of this machine: since when it runs, and its memory."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One process now.

    Attributes:
        start: when it started, in the kernel's ticks since the machine did.
        resident_bytes: its memory that is not swapped out.
    """

    start: int
    resident_bytes: int


def read_process(pid: int) -> Process | None:
    """Return what /proc tells of a process; None where it is gone, or waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name before may hold spaces
    if state in "ZX":
        return None
    # proc(5): fields 22 and 24, and the state is field 3.
    return Process(start=int(rest[18]), resident_bytes=int(rest[20]) * _PAGE_BYTES)


def process_start(pid: int) -> int:
    """Return when a process that runs was started, in the kernel's ticks.

    Raises:
        ProcessLookupError: there is none.
    """
    process = read_process(pid)
    if process is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return process.start


def seconds_since_start() -> float:
    """Return for how long this process has run, at most a tick too much."""
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, since_boot - process_start(os.getpid()) * TICK_SECONDS)

"""What the kernel says of a process of this machine: since when it runs, its state, its memory."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")

PROCESS_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "blocked in the kernel",
    "T": "stopped",
    "t": "stopped by a debugger",
    "I": "idle",
}
"""The letters of proc(5) in words, but for those of processes that have ended."""


@dataclass(frozen=True)
class Process:
    """One process now.

    Attributes:
        start: when it started, in the kernel's ticks since the machine did.
        state: a letter of proc(5); of several threads, the first one's.
        resident_bytes: its memory that is not swapped out.
    """

    pid: int
    start: int
    state: str
    resident_bytes: int


@dataclass(frozen=True)
class ThreadNow:
    """One thread of a process.

    Attributes:
        state: a letter of proc(5).
        waits_in: the function of the kernel in which it waits; empty where that is not told.
    """

    id: int
    name: str
    state: str
    waits_in: str


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
    return Process(
        pid=pid, start=int(rest[18]), state=state, resident_bytes=int(rest[20]) * _PAGE_BYTES
    )


def threads_of(process: Process) -> Iterator[ThreadNow]:
    """Yield the threads of a process, as far as they are there when it is their turn."""
    tasks = Path(f"/proc/{process.pid}/task")
    try:
        ids = sorted(int(one.name) for one in tasks.iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return
    for number in ids:
        try:
            text = (tasks / str(number) / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        yield ThreadNow(number, name, rest.split()[0], _waits_in(tasks / str(number)))


def _waits_in(task: Path) -> str:
    try:
        return (task / "wchan").read_text().strip("\0 0")
    except OSError:  # not every kernel tells it
        return ""


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

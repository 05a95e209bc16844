"""Read a process of this machine from /proc: start time, state, memory, threads."""

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
"""Letters of proc(5) in words, without the states of ended processes."""


@dataclass(frozen=True)
class Process:
    """Snapshot of one process.

    Attributes:
        start: Start time in the kernel's ticks since boot.
        state: A letter of proc(5), for the first of several threads.
        resident_bytes: Memory that is not swapped out.
    """

    pid: int
    start: int
    state: str
    resident_bytes: int


@dataclass(frozen=True)
class ThreadNow:
    """Snapshot of one thread of a process.

    Attributes:
        state: A letter of proc(5).
        waits_in: Kernel function in which the thread waits; empty if the kernel does not report it.
    """

    id: int
    name: str
    state: str
    waits_in: str


def read_process(pid: int) -> Process | None:
    """Read a process from /proc; None if it does not exist or waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name in front may contain spaces
    if state in "ZX":
        return None
    # proc(5): fields 22 and 24, and the state is field 3.
    return Process(
        pid=pid, start=int(rest[18]), state=state, resident_bytes=int(rest[20]) * _PAGE_BYTES
    )


def threads_of(process: Process) -> Iterator[ThreadNow]:
    """Yield the threads of a process; threads that end meanwhile are skipped."""
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
    except OSError:  # not every kernel reports it
        return ""


def process_start(pid: int) -> int:
    """Return the start time of a running process, in the kernel's ticks.

    Raises:
        ProcessLookupError: There is no such process.
    """
    process = read_process(pid)
    if process is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return process.start


def seconds_since_start() -> float:
    """Return how long this process has run, at most one tick too much."""
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return max(0.0, since_boot - process_start(os.getpid()) * TICK_SECONDS)

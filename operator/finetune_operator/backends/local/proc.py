"""Processes as the kernel tells them: who lives, since when, of which attempt.

A pid alone names nothing for long. A process is known by pid, start time and boot; the processes of
an attempt by a variable in their environment, as torchrun gives every rank a session of its own.
Standard library only: the launcher imports it before a node's main process exists.
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_DEAD = frozenset("ZXx")


@dataclass(frozen=True)
class Process:
    """One process of this machine.

    Attributes:
        pid: Its id.
        start_time: Clock ticks from boot to its start.
        boot_id: Which boot.
    """

    pid: int
    start_time: int
    boot_id: str

    def is_alive(self) -> bool:
        """Say whether it runs; a zombie does not."""
        return look_up(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this very process; return False when it is gone.

        The descriptor is taken before the look, so a pid that is reused in between is never hit.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def boot_id() -> str:
    """Return the id of this boot; pids and start times count from it."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def look_up(pid: int) -> Process | None:
    """Return the living process of that id, or None."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in brackets and may hold anything, brackets and spaces too.
    state, *fields = text.rpartition(")")[2].split()
    if state in _DEAD:
        return None
    return Process(pid=pid, start_time=int(fields[18]), boot_id=boot_id())


def marked(variable: str, prefix: str) -> list[Process]:
    """Return the living processes of this user whose environment sets `variable` to `prefix`...."""
    wanted = f"{variable}={prefix}".encode()
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or of another user
        is_marked = any(setting.startswith(wanted) for setting in environment)
        if is_marked and (process := look_up(int(entry.name))) is not None:
            found.append(process)
    return found

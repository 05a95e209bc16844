"""Find processes of this machine: whether they are alive, and to which attempt they belong.

A process is identified by pid, start time and boot, because pids are reused. The processes of an
attempt are identified by a variable in their environment, because torchrun gives every rank a
session of its own. Standard library only: the launcher imports it before a node's main process
exists.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_DEAD = frozenset("ZXx")
# Process flags in /proc/PID/stat: a kernel thread, and a process that is exiting.
_WITHOUT_MEMORY = 0x00200000 | 0x00000004
_EXEC_SECONDS = 1.0
# Indexes of its fields, from the third on (proc(5)).
_STATE, _FLAGS, _START_TIME, _ENV_START, _ENV_END = 0, 6, 19, 47, 48


@dataclass(frozen=True)
class Process:
    """A process of this machine.

    Attributes:
        pid: Its id.
        start_time: Clock ticks from boot to its start.
        boot_id: Id of the boot.
    """

    pid: int
    start_time: int
    boot_id: str

    def is_alive(self) -> bool:
        """Return whether the process runs; a zombie does not."""
        return look_up(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to the process; return False if it has ended.

        The pidfd is opened before the check, so a reused pid never gets the signal.
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
    """Return the id of this boot, during which pids and start times are valid."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def look_up(pid: int) -> Process | None:
    """Return the living process of that id, or None."""
    try:
        fields = _status(_PROC / str(pid))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[_STATE] in _DEAD:
        return None
    return Process(pid=pid, start_time=int(fields[_START_TIME]), boot_id=boot_id())


def marked(variable: str, prefix: str) -> list[Process]:
    """Return this user's living processes in whose environment `variable` starts with `prefix`."""
    wanted = f"{variable}={prefix}".encode()
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            settings = _environment(entry).split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended in the meantime, or of another user
        is_marked = any(setting.startswith(wanted) for setting in settings)
        if is_marked and (process := look_up(int(entry.name))) is not None:
            found.append(process)
    return found


def _environment(entry: Path) -> bytes:
    """Return the environment of a process, which reads as empty during an exec.

    An exec takes microseconds, so this waits for its end, but at most a second.
    """
    end = time.monotonic() + _EXEC_SECONDS
    while not (settings := (entry / "environ").read_bytes()):
        fields = _status(entry)
        is_dead = fields[_STATE] in _DEAD or int(fields[_FLAGS]) & _WITHOUT_MEMORY
        is_empty = fields[_ENV_START] == fields[_ENV_END] != "0"
        if is_dead or is_empty or time.monotonic() > end:
            break
        time.sleep(0.0001)
    return settings


def _status(entry: Path) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    # The name before these fields is in brackets and may contain any bytes, even brackets and
    # incomplete UTF-8.
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()

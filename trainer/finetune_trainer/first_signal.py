"""Remember a SIGTERM or SIGINT that comes before the trainer can handle it.

`__main__` calls `listen` first, and `control.StopSignal` reads the signal when it takes over. This
module imports only `signal`, because a signal before `listen` ends this process without a message,
or is lost if the process is PID 1 of a container.
"""

import signal
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGINT)
"""Signals that request a stop."""

_came: list[str] = []  # global, like a process's signal handlers


def listen() -> None:
    """Replace the default handlers of the signals; call from the main thread."""
    for number in NUMBERS:
        signal.signal(number, _note)


def name() -> str | None:
    """Return the name of the first signal since `listen`; None without one."""
    return _came[0] if _came else None


def _note(number: int, frame: FrameType | None) -> None:
    _came.append(signal.Signals(number).name)

"""Remembers a SIGTERM or SIGINT that comes before anything can act on it.

`__main__` listens with its first statement, and `control.StopSignal` reads it when it takes over.
It imports nothing but `signal`: until it listens, a signal ends this process without a message, or
is lost where this is PID 1 of a container.
"""

import signal
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask a process to stop."""

_came: list[str] = []  # a process has one set of handlers


def listen() -> None:
    """Take the signals over from their default; call from the main thread."""
    for number in NUMBERS:
        signal.signal(number, _note)


def name() -> str | None:
    """Return the name of the signal that came first since `listen`; None if none has."""
    return _came[0] if _came else None


def _note(number: int, frame: FrameType | None) -> None:
    _came.append(signal.Signals(number).name)

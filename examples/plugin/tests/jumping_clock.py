"""An event loop whose clock jumps to the next timer: waits of minutes take no time.

The loop waits neither for sockets nor for threads.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise AssertionError("deadlock: no timer is pending")
        if not events and timeout:
            self.time += timeout
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.time


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on such a loop."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(test)

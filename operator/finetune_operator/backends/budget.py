"""Rate limit of requests to a service: each request waits for its turn, writes before reads.

A backend behind a service that throttles has one budget for each throttled account. A budget
belongs to one event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import IntEnum

from finetune_operator.errors import TransientError

PATIENCE_SECONDS = 20.0
"""Longest wait. A write, or any request during a pause, that would wait longer raises a
TransientError.
"""

LONGEST_PAUSE_SECONDS = 120.0
"""Longest pause, even if a service asks to wait longer."""

_WRITES_IN_A_ROW = 3
"""A waiting read has its turn after at most this many other requests."""


def pace(environ: Mapping[str, str], variable: str, usual: str) -> float:
    """Return the maximum requests per second that a variable of the environment sets.

    Raises:
        ValueError: The value is invalid.
    """
    text = environ.get(variable, usual)
    if (value := float(text)) <= 0:
        raise ValueError(f"{variable} is {text}; set the number of requests per second")
    return value


class Priority(IntEnum):
    """Order of requests."""

    WRITE = 0  # a write, or a read that a write waits for
    END = 1  # a read after the end of an attempt, for which the job waits
    READ = 2
    CHECK = 3  # a read before the first attempt of a job, at most one at a time; its turn is a READ


class Budget:
    """Admits requests at a rate that is never exceeded.

    Args:
        per_second: Requests per second.
        reads_at_once: Maximum reads in flight, besides an END and a CHECK.
    """

    def __init__(self, per_second: float, reads_at_once: int) -> None:
        self._reading = {
            Priority.END: asyncio.Semaphore(1),
            Priority.READ: asyncio.Semaphore(reads_at_once),
            Priority.CHECK: asyncio.Semaphore(1),
        }
        self._interval = 1.0 / per_second
        self._next = 0.0
        self._paused_until = 0.0
        self._waiting: dict[Priority, deque[asyncio.Future[None]]] = {p: deque() for p in Priority}
        self._writes = 0
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def held(self, priority: Priority) -> AsyncIterator[None]:
        """Limit the requests in flight: hold a slot from before the turn until the response."""
        if priority is Priority.WRITE:
            yield
            return
        async with self._reading[priority]:
            yield

    async def turn(self, priority: Priority) -> None:
        """Wait until a request may be sent; requests of equal priority keep their order.

        Raises:
            TransientError: The service has requested a pause longer than PATIENCE_SECONDS, or a
                write would wait longer.
        """
        loop = asyncio.get_running_loop()
        waiting = self._waiting[Priority.READ if priority is Priority.CHECK else priority]
        if (left := self._paused_until - loop.time()) > PATIENCE_SECONDS:
            raise _late(left)
        wait = len(waiting) * self._interval + max(0.0, self._next - loop.time())
        if priority is Priority.WRITE and wait > PATIENCE_SECONDS:
            raise _late(wait)
        turn = loop.create_future()
        waiting.append(turn)
        self._plan(loop)
        try:
            await turn
        finally:
            if turn in waiting:  # the caller no longer waits
                waiting.remove(turn)

    def hold(self, seconds: float) -> float:
        """Pause all requests at the service's request; return the duration in seconds."""
        loop, seconds = asyncio.get_running_loop(), min(seconds, LONGEST_PAUSE_SECONDS)
        self._paused_until = max(self._paused_until, loop.time() + seconds)
        self._next = max(self._next, self._paused_until)
        if (left := self._paused_until - loop.time()) > PATIENCE_SECONDS:
            for waiting in self._waiting.values():
                for turn in waiting:
                    if not turn.done():
                        turn.set_exception(_late(left))
                waiting.clear()
        return seconds

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and any(self._waiting.values()):
            self._timer = loop.call_at(max(self._next, loop.time()), self._let_go, loop)

    def _let_go(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._next <= loop.time() and (queue := self._first()):
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                self._next = loop.time() + self._interval
        self._plan(loop)

    def _first(self) -> deque[asyncio.Future[None]]:
        """Return the queue that has the next turn."""
        writes = self._waiting[Priority.WRITE]
        reads = self._waiting[Priority.END] or self._waiting[Priority.READ]
        is_write = bool(writes) and (self._writes < _WRITES_IN_A_ROW or not reads)
        self._writes = self._writes + 1 if is_write else 0
        return writes if is_write else reads


def _late(wait: float) -> TransientError:
    return TransientError(f"the next request may be sent in {wait:.0f} s", wait)

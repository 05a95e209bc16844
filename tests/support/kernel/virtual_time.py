"""An event loop whose clock jumps to the next timer instead of waiting for it.

It stands still while a thread works for the loop, but not for one that hangs (`hang`).
"""

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Selector(selectors.DefaultSelector):
    """Never waits for time, which has passed then; only for threads.

    Attributes:
        working: Calls in threads that have not ended and do not hang.
    """

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.working: set[object] = set()

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(None if self.working and timeout != 0 else 0)
        if not found and timeout:
            self.time += timeout
        elif not found and timeout is None:
            raise AssertionError("everything waits for ever")
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what has no input or output, in no time."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.time

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        call, working = object(), self._virtual.working

        def work() -> T:
            _in_thread.note_hang = lambda: self.call_soon_threadsafe(working.discard, call)
            return func(*args)

        working.add(call)
        answer = super().run_in_executor(executor, work)
        answer.add_done_callback(lambda _: working.discard(call))
        return answer

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._virtual.working.add(self)  # a thread ends the others
        await super().shutdown_default_executor(*args)
        self._virtual.working.discard(self)


_in_thread = threading.local()


def hang() -> None:
    """Hang for ever, in a thread; a virtual loop does not wait for it."""
    if hasattr(_in_thread, "note_hang"):
        _in_thread.note_hang()
    threading.Event().wait()


def run(what: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(what)

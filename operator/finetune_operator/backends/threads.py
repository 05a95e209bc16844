"""Blocking calls in a few threads, of which any may hang for ever."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from threading import Thread
from typing import ParamSpec, TypeVar

from finetune_operator.errors import TransientError

T = TypeVar("T")
P = ParamSpec("P")


class _DaemonThreads(Executor):
    """Runs each call in a thread of its own, which no process waits for at its end."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        Thread(target=work, name="backend", daemon=True).start()
        return future


class BlockingCalls:
    """Runs blocking calls, some at once; a call that hangs keeps its thread.

    Args:
        owner: Whose calls they are, as messages name it.
        threads: How many run at once.
    """

    def __init__(self, owner: str, threads: int) -> None:
        self._owner = owner
        self._threads = threads
        self._free = asyncio.Semaphore(threads)
        self._executor = _DaemonThreads()

    async def run(self, what: str, call: Callable[[], T], seconds: float | None) -> T:
        """Return what `call` returns.

        Args:
            what: What it does, as messages name it.
            call: Blocks.
            seconds: How long to wait for a free thread and for the call; None for ever.

        Raises:
            TransientError: it took longer.
        """
        loop, is_running = asyncio.get_running_loop(), False

        def work() -> T:
            try:
                return call()
            finally:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._free.release)

        try:
            async with asyncio.timeout(seconds) as limit:
                await self._free.acquire()
                is_running = True
                return await loop.run_in_executor(self._executor, work)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the call's own
            if is_running:
                said = f"{what} took more than {seconds:g} s; see that what it asks can be reached"
            else:
                said = (
                    f"each of its {self._threads} threads for {what} has hung for more than "
                    f"{seconds:g} s; restart the operator if it lasts"
                )
            raise TransientError(f"{self._owner}: {said}") from error

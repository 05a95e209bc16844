"""Blocking calls in a few threads, of which any may hang for ever."""

import asyncio
from collections.abc import Awaitable, Callable
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


async def within(seconds: float | None, what: str, work: Callable[[], Awaitable[T]]) -> T:
    """Return what `work` returns, which is cancelled if it takes longer.

    Raises:
        TransientError: it did.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work()
    except TimeoutError as error:
        if not limit.expired():
            raise  # its own
        raise TransientError(
            f"{what} took more than {seconds:g} s; see that what it asks can be reached"
        ) from error


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
            seconds: How long to wait for a free thread, and then for the call; None for ever.

        Raises:
            TransientError: it took longer.
        """
        loop = asyncio.get_running_loop()
        late = f"{self._owner}: all {self._threads} threads for {what} hang; waiting for one"
        await within(seconds, late, self._free.acquire)

        def work() -> T:
            try:
                return call()
            finally:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._free.release)

        running = loop.run_in_executor(self._executor, work)
        return await within(seconds, f"{self._owner}: {what}", lambda: running)

"""Run blocking calls, each of which may hang forever, in a limited number of threads."""

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
    """Runs each call in its own thread, for which the process does not wait at exit."""

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
    """Return the result of `work`, which is cancelled if it takes longer.

    Raises:
        TransientError: It took longer.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work()
    except TimeoutError as error:
        if not limit.expired():
            raise  # a timeout of `work` itself
        raise TransientError(
            f"{what} took more than {seconds:g} s; check that its service can be reached"
        ) from error


class BlockingCalls:
    """Runs blocking calls, some at once; a call that hangs occupies its thread.

    Args:
        owner: Owner of the calls, for messages.
        threads: Number of concurrent calls.
    """

    def __init__(self, owner: str, threads: int) -> None:
        self._owner = owner
        self._threads = threads
        self._free = asyncio.Semaphore(threads)
        self._executor = _DaemonThreads()

    async def run(self, what: str, call: Callable[[], T], seconds: float | None) -> T:
        """Return the result of `call`.

        Args:
            what: Purpose of the call, for messages.
            call: Blocks.
            seconds: How long to wait for a free thread, and then for the call; None for unlimited.

        Raises:
            TransientError: It took longer.
        """
        loop = asyncio.get_running_loop()
        late = (
            f"{self._owner}: all {self._threads} threads for {what} hang; waiting for a free thread"
        )
        await within(seconds, late, self._free.acquire)

        def work() -> T:
            try:
                return call()
            finally:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._free.release)

        running = loop.run_in_executor(self._executor, work)
        return await within(seconds, f"{self._owner}: {what}", lambda: running)

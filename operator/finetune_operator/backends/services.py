"""What the operator lends a backend while it is started."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from finetune_operator.backends.threads import BlockingCalls
from finetune_operator.errors import BrokenBackendError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.errors import NotLeadingError

T = TypeVar("T")


class HostedServices:
    """What one backend is lent; of no use any more once it is closed.

    Args:
        owner: The backend, as messages name it.
        threads: Of its blocking calls.
        wake: Has a job reconciled; on the event loop.
        seconds_to_write: Time left in which this process may write; None: no limit.
    """

    def __init__(
        self,
        owner: str,
        threads: int,
        wake: Callable[[Key], None],
        seconds_to_write: Callable[[], float] | None,
    ) -> None:
        self._owner = owner
        self._wake = wake
        self._seconds_to_write = seconds_to_write
        self._loop = asyncio.get_running_loop()
        self._calls = BlockingCalls(owner, threads) if threads else None
        self._is_closed = False

    def wake(self, job: Key) -> None:
        """Have a job reconciled soon; from any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wake_now, job)

    def check_may_write(self) -> None:
        """Raise NotLeadingError where this process may not write (any more); from any thread."""
        left = self._seconds_to_write() if self._seconds_to_write else 1.0
        if self._is_closed or left <= 0:
            raise NotLeadingError(f"{self._owner} may not write, as this replica does not lead")

    async def run_blocking(self, call: Callable[[], T], seconds: float) -> T:
        """Return what `call` returns in one of the backend's own threads."""
        if self._calls is None:
            raise BrokenBackendError(f"{self._owner} declares no `threads`, and calls run_blocking")
        return await self._calls.run("a blocking call", call, seconds)

    def close(self) -> None:
        """Wake nothing any more, and let nothing be written."""
        self._is_closed = True

    def _wake_now(self, job: Key) -> None:
        if not self._is_closed:
            self._wake(job)

"""An event loop on a thread of its own, for servers that tests talk to without awaiting."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_SECONDS = 90.0  # longer than what is run there waits for itself, as `bound_claims` does


@dataclass(frozen=True)
class LoopThread:
    """A loop that runs on another thread."""

    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_SECONDS)


@contextmanager
def loop_thread() -> Iterator[LoopThread]:
    """Yield a loop; at the end every task of it is ended, and then the loop."""
    made = LoopThread(asyncio.new_event_loop())
    thread = threading.Thread(target=made.loop.run_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.run(_end_other_tasks())
        made.loop.call_soon_threadsafe(made.loop.stop)
        thread.join(_SECONDS)
        made.loop.close()


async def _end_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)

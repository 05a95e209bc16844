"""Ctrl-C and SIGTERM for `ftctl run` and `ftctl dev`: the first stops, the second kills."""

import asyncio
import signal
from collections.abc import Callable


class StopSignals:
    """Stop requests of the user; to be used on the event loop.

    Attributes:
        asked: Stop with a checkpoint, like `spec.suspend: true`; the next run resumes from it.
        forced: Kill all processes; the next run resumes from the last committed checkpoint.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()

    def listen(self, on_signal: Callable[[], object] = lambda: None) -> None:
        """Handle signals from now on; `on_signal` is called after the first and the second."""

        def hit() -> None:
            event = self.forced if self.asked.is_set() else self.asked
            if not event.is_set():
                event.set()
                on_signal()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, hit)

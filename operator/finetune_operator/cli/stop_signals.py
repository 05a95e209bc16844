"""Ctrl-C and SIGTERM for `ftctl run` and `ftctl dev`: the first stops, the second kills."""

import asyncio
import signal
from collections.abc import Callable


class StopSignals:
    """What the user has asked for; use it on the event loop.

    Attributes:
        asked: Stop with a checkpoint, as `spec.suspend: true` would; the next run goes on from it.
        forced: Kill what still runs; the next run goes on from the last committed checkpoint.
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

"""What Ctrl-C and SIGTERM ask of `ftctl run` and `ftctl dev`: first a checkpoint, then a kill."""

import asyncio
import signal
from collections.abc import Callable


class StopSignals:
    """A person's wish to stop; it is used on the event loop.

    Attributes:
        asked: Stop with a checkpoint, as `spec.suspend: true` would; the next run goes on from it.
        forced: Kill what is still there; the next run goes on from the last committed checkpoint.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()

    def listen(self, on_wish: Callable[[], object] = lambda: None) -> None:
        """Take each signal for the next wish from now on, and call `on_wish` after it."""

        def hit() -> None:
            wish = self.forced if self.asked.is_set() else self.asked
            if not wish.is_set():
                wish.set()
                on_wish()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, hit)

    def force(self) -> None:
        """Wish for both, as two signals do."""
        self.asked.set()
        self.forced.set()

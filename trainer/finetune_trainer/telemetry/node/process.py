"""The process that serves a node's page, started again when it ends before it should."""

import socket
import subprocess
import sys
from collections.abc import Callable
from threading import Event, Thread

_SECONDS_BETWEEN_STARTS = 60.0  # at most; one, two, four, ... before
_MODULE = "finetune_trainer.telemetry.node"


class PageProcess:
    """One process after the other, on one socket that listens all the time."""

    def __init__(
        self, words: tuple[str, ...], listener: socket.socket, warn: Callable[[str], None]
    ) -> None:
        """Start the first; `words` are its arguments, and the socket is this object's from now on.

        Raises:
            OSError: it cannot be started.
        """
        self._words, self._listener, self._warn = words, listener, warn
        self._has_ended = Event()
        self._keeper: Thread | None = None
        self._process = self._start()

    def keep(self) -> None:
        """Start another whenever it ends, from a thread, until `end`."""
        self._keeper = Thread(target=self._keep, name="page-keeper", daemon=True)
        self._keeper.start()

    def end(self) -> None:
        """End it for good, and free its port; it has nothing to finish."""
        self._has_ended.set()
        self._process.kill()
        if self._keeper is not None:
            self._keeper.join()
        self._let_go()
        self._listener.close()

    def _keep(self) -> None:
        pause = 1.0
        while True:
            code = self._process.wait()
            if self._has_ended.is_set():
                return
            self._warn(f"the page of this node ended (exit {code}), and is started again")
            if self._has_ended.wait(pause):
                return
            pause = min(2 * pause, _SECONDS_BETWEEN_STARTS)
            self._let_go()
            try:
                self._process = self._start()
            except OSError as error:
                self._warn(f"the page of this node cannot be started again ({error})")
                return
            if self._has_ended.is_set():  # `end` may have met the one before
                self._process.kill()

    def _start(self) -> "subprocess.Popen[bytes]":
        number = self._listener.fileno()
        return subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, *self._words, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,  # Ctrl-C is for the supervisor alone
        )

    def _let_go(self) -> None:
        self._process.wait()
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()

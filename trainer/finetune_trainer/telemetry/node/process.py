"""Run the process that serves a node's page, and restart it if it ends early."""

import socket
import subprocess
import sys
from collections.abc import Callable
from threading import Event, Thread

_SECONDS_BETWEEN_STARTS = 60.0  # upper bound of the backoff, which starts at 1 s
_MODULE = "finetune_trainer.telemetry.node"


class PageProcess:
    """A restarted process on one socket that listens all the time."""

    def __init__(
        self, words: tuple[str, ...], listener: socket.socket, warn: Callable[[str], None]
    ) -> None:
        """Start the process with arguments `words`; this object then owns the socket.

        Raises:
            OSError: The process cannot be started.
        """
        self._words, self._listener, self._warn = words, listener, warn
        self._has_ended = Event()
        self._restarter: Thread | None = None
        self._process = self._start()

    def restart_on_exit(self) -> None:
        """Restart the process from a thread whenever it ends, until `end`."""
        self._restarter = Thread(target=self._restart, name="page-keeper", daemon=True)
        self._restarter.start()

    def end(self) -> None:
        """Kill the process and free its port; it has no state to save."""
        self._has_ended.set()
        self._process.kill()
        if self._restarter is not None:
            self._restarter.join()
        self._release()
        self._listener.close()

    def _restart(self) -> None:
        pause = 1.0
        while True:
            code = self._process.wait()
            if self._has_ended.is_set():
                return
            self._warn(f"the page of this node ended (exit {code}) and is restarted")
            if self._has_ended.wait(pause):
                return
            pause = min(2 * pause, _SECONDS_BETWEEN_STARTS)
            self._release()
            try:
                self._process = self._start()
            except OSError as error:
                self._warn(f"the page of this node cannot be restarted ({error})")
                return
            if self._has_ended.is_set():  # `end` may have killed only the previous process
                self._process.kill()

    def _start(self) -> "subprocess.Popen[bytes]":
        number = self._listener.fileno()
        return subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, *self._words, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,  # only the supervisor gets Ctrl-C
        )

    def _release(self) -> None:
        self._process.wait()
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()

"""Encode batches in one process per core and return them in the order they were submitted.

Called by `sequences` once a data set turns out to be large. The processes are separate programs: a
rank may already hold gloo threads and a CUDA context, which do not survive a fork. They read
batches from standard input, write encoded batches to standard output, do not access files, and
terminate with the process that started them, even if it is killed. They run no tokenizer threads.
The output does not depend on the number of processes.
"""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from finetune_trainer.config import DataConfig
from finetune_trainer.data.piecework import Batch, BatchEncoder, EncodedBatch
from finetune_trainer.data.rules import Rules
from finetune_trainer.errors import TrainerError
from finetune_trainer.with_parent import end_with_parent

AHEAD = 2  # batches per process that are read, encoded or waiting to be written
_READY = "ready"

Process = subprocess.Popen[bytes]


class Crew:
    """Processes with one encoder each; as a context manager it kills them all on exit."""

    def __init__(
        self, config: DataConfig, tokenizer: Any, count: int, rules: Rules = Rules.CURRENT
    ) -> None:
        """Start the processes; they load for some seconds, until `is_ready`.

        Raises:
            OSError: a process cannot be started.
            Exception: the tokenizer cannot be sent to another process.
        """
        self._count = count
        setup = pickle.dumps((os.getpid(), config, tokenizer, rules))
        self._idle: SimpleQueue[Process | None] = SimpleQueue()  # None: the crew is closed
        self._processes: list[Process] = []
        self._threads = ThreadPoolExecutor(count, "tokenise")
        self._starting: list[Future[None]] = []
        try:
            for _ in range(count):
                self._processes.append(_start())
                process = self._processes[-1]
                self._starting.append(self._threads.submit(self._set_up, process, setup))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the crew."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill every process, also a busy one."""
        self.close()

    def is_ready(self) -> bool:
        """Whether all processes accept batches.

        Raises:
            TrainerError: a process has terminated instead.
        """
        if not all(one.done() for one in self._starting):
            return False
        for one in self._starting:
            one.result()
        return True

    def encode(self, batches: Iterator[Batch]) -> Iterator[EncodedBatch]:
        """Yield encoded batches in order; errors are raised in the order of the batches, too.

        Raises:
            DataError: a row cannot be used.
            TrainerError: a process has terminated prematurely.
        """
        pending: deque[Future[EncodedBatch]] = deque()
        unread: Exception | None = None
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # raised once all earlier batches are encoded
                batch, unread = None, error
            if batch is None:
                break
            pending.append(self._threads.submit(self._request, batch))
            if len(pending) == AHEAD * self._count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if unread is not None:
            raise unread

    def close(self) -> None:
        """Kill every process and wait for its end."""
        for process in self._processes:
            process.kill()
        for _ in range(self._count):
            self._idle.put(None)
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None, "both pipes were requested"
                try:
                    pipe.close()
                except BrokenPipeError:  # buffered input that the process never read
                    continue

    def _set_up(self, process: Process, setup: bytes) -> None:
        assert process.stdin is not None, "the pipe was requested"
        try:
            process.stdin.write(setup)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has terminated; reading from it raises
        if _read(process) == _READY:
            self._idle.put(process)

    def _request(self, batch: Batch) -> EncodedBatch:
        process = self._idle.get()
        if process is None:
            raise TrainerError("the processes that tokenise rows have been closed")
        assert process.stdin is not None, "the pipe was requested"
        try:
            pickle.dump(batch, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has terminated; reading from it raises
        finally:
            reply = _read(process, self._idle)
        if isinstance(reply, EncodedBatch):
            return reply
        assert isinstance(reply, BaseException), "a process replies with a batch or an error"
        raise reply


def _start() -> Process:
    environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        start_new_session=True,  # a Ctrl-C in the terminal must reach only the parent
    )


def _read(process: Process, idle: "SimpleQueue[Process | None] | None" = None) -> Any:
    """Return the reply of a process, and put the process into `idle`."""
    assert process.stdout is not None, "the pipe was requested"
    try:
        reply = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError) as error:
        status = process.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        raise TrainerError(
            f"a process that tokenises rows ended with {how}; see its error above, or give the "
            "pod more memory, or fewer cores, if memory ran out"
        ) from error
    if idle is not None:
        idle.put(process)
    return reply


def main() -> None:
    """Run as one of the processes: encode batches until standard input ends."""
    from finetune_trainer.unused_packages import hide_torch

    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps the output of libraries out of the pipe
    hide_torch()
    parent, config, tokenizer, rules = pickle.load(requests)
    end_with_parent(parent, signal.SIGKILL)
    encoder = BatchEncoder(config, tokenizer, rules)
    _reply(replies, _READY)
    while True:
        try:
            batch = pickle.load(requests)
        except EOFError:
            return
        try:
            _reply(replies, encoder.encode(batch))
        except TrainerError as error:
            _reply(replies, error)
        except Exception as error:
            traceback.print_exc()
            _reply(replies, RuntimeError(f"{type(error).__name__}: {error}"))


def _reply(replies: Any, reply: Any) -> None:
    pickle.dump(reply, replies)
    replies.flush()

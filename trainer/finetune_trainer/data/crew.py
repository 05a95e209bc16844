"""Processes that encode batches, one a core, and give them back in the order they were given.

Called by `sequences` once a data set turns out to be large. They are programs of their own, as a
rank may have threads of gloo and a CUDA context by now, which no fork survives; they read batches
from their standard input, write what these become to their standard output, touch no file, and
end with the process that started them, even when it is killed. The tokenizer's own threads are off
in them. What comes out does not depend on how many they are.
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
from finetune_trainer.errors import TrainerError
from finetune_trainer.with_parent import end_with_parent

AHEAD = 2  # batches a process that are read, encoded or waiting to be written
_READY = "ready"

Process = subprocess.Popen[bytes]


class Crew:
    """Some processes with an encoder each; a context manager, which ends them all."""

    def __init__(self, config: DataConfig, tokenizer: Any, count: int) -> None:
        """Start them; `is_ready` says when they have loaded what they need, some seconds later.

        Raises:
            OSError: no process can be started.
            Exception: the tokenizer cannot be sent to another process.
        """
        self._count = count
        setup = pickle.dumps((os.getpid(), config, tokenizer))
        self._idle: SimpleQueue[Process | None] = SimpleQueue()  # None: there is none any more
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
        """End every process, whatever it is doing."""
        self.close()

    def is_ready(self) -> bool:
        """Say whether all of them can take batches.

        Raises:
            TrainerError: one has ended instead.
        """
        if not all(one.done() for one in self._starting):
            return False
        for one in self._starting:
            one.result()
        return True

    def encode(self, batches: Iterator[Batch]) -> Iterator[EncodedBatch]:
        """Encode batches; the errors come in the order of the batches as well.

        Raises:
            DataError: a row cannot be used.
            TrainerError: a process has ended before its time.
        """
        asked: deque[Future[EncodedBatch]] = deque()
        unread: Exception | None = None
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # told when all that was read before it is encoded
                batch, unread = None, error
            if batch is None:
                break
            asked.append(self._threads.submit(self._ask, batch))
            if len(asked) == AHEAD * self._count:
                yield asked.popleft().result()
        while asked:
            yield asked.popleft().result()
        if unread is not None:
            raise unread

    def close(self) -> None:
        """End every process, and wait for them."""
        for process in self._processes:
            process.kill()
        for _ in range(self._count):
            self._idle.put(None)
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None, "both were asked for"
                try:
                    pipe.close()
                except BrokenPipeError:  # of what it was sent and never read
                    continue

    def _set_up(self, process: Process, setup: bytes) -> None:
        assert process.stdin is not None, "it was asked for"
        try:
            process.stdin.write(setup)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone, which its silence tells
        if _read(process) == _READY:
            self._idle.put(process)

    def _ask(self, batch: Batch) -> EncodedBatch:
        process = self._idle.get()
        if process is None:
            raise TrainerError("nobody is there any more to tokenise rows")
        assert process.stdin is not None, "it was asked for"
        try:
            pickle.dump(batch, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone, which its silence tells
        finally:
            made = _read(process, self._idle)
        if isinstance(made, EncodedBatch):
            return made
        assert isinstance(made, BaseException), "it says nothing else"
        raise made


def _start() -> Process:
    environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        start_new_session=True,  # a Ctrl-C in the terminal is its parent's alone
    )


def _read(process: Process, idle: "SimpleQueue[Process | None] | None" = None) -> Any:
    """Return what a process says, and let it be idle then."""
    assert process.stdout is not None, "it was asked for"
    try:
        said = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError) as error:
        status = process.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        raise TrainerError(
            f"a process that tokenises rows ended with {how}; see its error above, or give the "
            "pod more memory, or fewer cores, if memory ran out"
        ) from error
    if idle is not None:
        idle.put(process)
    return said


def main() -> None:
    """Be one of the processes."""
    from finetune_trainer.unused_packages import hide_torch

    asked = sys.stdin.buffer
    said = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is not for the pipe
    hide_torch()
    parent, config, tokenizer = pickle.load(asked)
    end_with_parent(parent, signal.SIGKILL)
    encoder = BatchEncoder(config, tokenizer)
    _say(said, _READY)
    while True:
        try:
            batch = pickle.load(asked)
        except EOFError:
            return
        try:
            _say(said, encoder.encode(batch))
        except TrainerError as error:
            _say(said, error)
        except Exception as error:
            traceback.print_exc()
            _say(said, RuntimeError(f"{type(error).__name__}: {error}"))


def _say(said: Any, what: Any) -> None:
    pickle.dump(what, said)
    said.flush()

"""Handle stop requests of a rank, agree on them among the ranks, and choose the exit code.

`worker` installs the signal handlers and wraps the rank's work in `guard`; the loop votes in an
`Agreement` at every step boundary. Exit codes are chosen only here.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self, TypeVar

from finetune_trainer import first_signal
from finetune_trainer.config import ExitCode, FailureClass, Termination
from finetune_trainer.errors import LostRankError, Preempted, TrainerError
from finetune_trainer.world import World

if TYPE_CHECKING:
    import torch
    from torch.distributed import Work

_T = TypeVar("_T")

# Error texts of gloo, NCCL and the store if a peer is gone or does not respond.
_LOST_PEER_PHRASES = (
    "application timeout caused pair closure",
    "broken pipe",
    "communicator was aborted",
    "connectfullmesh failed",
    "connection closed by",
    "connection refused",
    "connection reset by peer",
    "connection timed out",
    "connection was likely closed",
    "failed to recv",
    "nccl timeout in communicator initialization",
    "ncclremoteerror",
    "no route to host",
    "operations have failed or timed out",
    "remote process exited",
    "socket timeout",
    "timed out waiting",
    "wait timeout after",
)
# Error texts of gloo and NCCL if a living peer does not enter a collective.
_HANG_PHRASES = (
    "due to collective timeout",
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "watchdog caught collective operation timeout",
    "watchdog hang",
)
# NCCL's name for any failed system call, mostly of a connection. The text after it shows whether
# the cause is on this node, such as too little shared memory.
_SYSTEM_ERROR_OF_NCCL = "ncclsystemerror"
_OF_THIS_NODE = ("shared memory", "/dev/shm", "no space left", "malloc failed", "mmap")
_LAST_ERROR_OF_NCCL = "Last error:"
_LOADING = "while the model was loaded"
_OUT_OF_MEMORY_PHRASES = (
    "can't allocate memory",
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda failure 2 'out of memory'",
    "cuda failure 'out of memory'",
    "failed to cuda calloc",
)


class Interrupted(BaseException):
    """Raised by a signal in interruptible work; must not be caught by `except Exception`."""


class StopSignal:
    """Remembers a SIGTERM or SIGINT; the loop checks it at step boundaries.

    A signal interrupts only work inside `interruptible` or `calling`. A second signal has no
    effect, because Ctrl-C in a terminal reaches a rank twice, from the terminal and from its
    supervisor.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._asked_at = 0.0
        self._notice_seconds = float("inf")
        self._callback: Callable[[], object] | None = None

    def install(self) -> None:
        """Handle SIGTERM and SIGINT, including earlier ones; call from the main thread."""
        for number in first_signal.NUMBERS:
            signal.signal(number, self._handle)
        if (came := first_signal.name()) is not None:
            self.request(came)

    def request(self, reason: str, notice_seconds: float = float("inf")) -> None:
        """Request a stop ("stopped by `reason`"); only the first request counts.

        `notice_seconds` is the time until the node is removed, if known.
        """
        if self._reason is None:
            self._asked_at, self._notice_seconds = time.monotonic(), notice_seconds
            self._reason = reason

    @property
    def requested(self) -> bool:
        """Whether a stop has been requested."""
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Name of the first signal, or None."""
        return self._reason

    def seconds_left(self, grace_seconds: float) -> float:
        """Return the time until this process must be gone; infinite before a request."""
        if self._reason is None:
            return float("inf")
        return self._asked_at + min(grace_seconds, self._notice_seconds) - time.monotonic()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal, including an earlier one, raise `Interrupted` in the block."""

        def interrupt() -> None:
            raise Interrupted

        with self.calling(interrupt):
            yield

    @contextmanager
    def calling(self, act: Callable[[], object]) -> Iterator[None]:
        """Let a signal, including an earlier one, call `act` once in the block."""
        try:
            self._callback = act
            if self.requested:
                self._call_once()
            yield
        finally:
            self._callback = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)
        self._call_once()

    def _call_once(self) -> None:
        act, self._callback = self._callback, None  # not again during cleanup
        if act is not None:
            act()


class Agreed(NamedTuple):
    """Result of all ranks' votes at one boundary; equal on every rank.

    Attributes:
        stop: A rank was asked to stop, so all commit a checkpoint and leave.
        save: A rank wants a checkpoint now.
        is_overtaken: Rank 0 has found a higher claim on a folder, so all leave at once.
        profile_steps: Number of steps to profile from the next one on.
    """

    stop: bool
    save: bool
    is_overtaken: bool = False
    profile_steps: int = 0

    def merged(self, other: Self) -> Self:
        """Return this result combined with the votes of `other`, except for its stop."""
        return self._replace(
            save=self.save or other.save,
            is_overtaken=self.is_overtaken or other.is_overtaken,
            profile_steps=max(self.profile_steps, other.profile_steps),
        )


class Agreement:
    """Agrees on votes with a small all-reduce per step, read one step later so that no rank waits.

    Every rank must call `exchange` at the same boundaries. All ranks see a vote at the same
    boundary, the next one after it was cast. A single process sees its own vote immediately.
    """

    def __init__(self, world: World) -> None:
        self._group = world.control_group
        self._liveness_barrier = world.liveness_barrier
        self._in_flight: tuple[Work, torch.Tensor] | None = None
        self._open = Agreed(False, False)  # votes seen between boundaries, for the next one

    def exchange(
        self, stop: bool, save: bool = False, is_overtaken: bool = False, profile_steps: int = 0
    ) -> Agreed:
        """Cast this rank's votes and return all ranks' votes of the previous boundary."""
        agreed = self._vote(Agreed(stop, save, is_overtaken, profile_steps))
        earlier, self._open = self._open, Agreed(False, False)
        return agreed.merged(earlier)

    def is_stopping(self, stop: bool) -> bool:
        """Vote for a stop between two boundaries; all other votes wait for the next boundary."""
        agreed = self._vote(Agreed(stop, False))
        self._open = self._open.merged(agreed)
        return agreed.stop

    def any(self, vote: bool) -> bool:
        """Return whether any rank votes True; waits for all ranks, however long they work."""
        self._liveness_barrier()
        own = self._vote(Agreed(vote, False))
        return (self.finish_vote() or own).stop

    def _vote(self, own: Agreed) -> Agreed:
        if self._group is None:
            return own

        import torch
        import torch.distributed as dist

        before = self.finish_vote()
        votes = torch.tensor(own, dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None  # async_op=True always returns the handle
        self._in_flight = (work, votes)
        return before or Agreed(False, False)

    def finish_vote(self) -> Agreed | None:
        """Finish the vote in flight, if any; also required before the groups are closed."""
        if self._in_flight is None:
            return None
        (work, votes), self._in_flight = self._in_flight, None
        work.wait()  # finished long ago: the 16 bytes were sent a whole step ago
        *flags, profile_steps = votes.tolist()
        stop, save, is_overtaken = map(bool, flags)
        return Agreed(stop, save, is_overtaken, profile_steps)


def unless_stopped(agreement: Agreement, stop: StopSignal, work: Callable[[], _T]) -> _T:
    """Do work that a signal may interrupt without loss of state; a collective.

    Raises:
        Preempted: The work was interrupted on some rank, so every rank leaves here.
    """
    done: list[_T] = []
    try:
        with stop.interruptible():
            done.append(work())
    except Interrupted:
        pass  # shared with all ranks below
    if agreement.any(not done):
        raise preempted(stop)
    return done[0]


@contextmanager
def loading_model() -> Iterator[None]:
    """Mark errors for `classify`, which then names the loading instead of the batch."""
    try:
        yield
    except Exception as error:
        error.add_note(_LOADING)
        raise


def preempted(stop: StopSignal, when: str = "without new state to save") -> Preempted:
    """Return the error with which every rank leaves."""
    return Preempted(f"stopped by {stop.reason or 'another rank'} {when}")


@dataclass(frozen=True)
class Verdict:
    """Meaning of an exception for the attempt.

    Attributes:
        is_collateral: The rank only lost its peers; another rank is the cause.
        is_gpu_memory: The memory of a GPU is exhausted.
    """

    failure_class: FailureClass
    exit_code: ExitCode
    message: str
    is_collateral: bool = False
    is_gpu_memory: bool = False

    @property
    def is_own_fault(self) -> bool:
        """Whether the rank that raised is the cause."""
        return not self.is_collateral and self.exit_code != ExitCode.PREEMPTED


def classify(error: BaseException) -> Verdict:
    """Derive failure class, exit code and message from an exception."""
    if isinstance(error, TrainerError):
        return Verdict(
            error.failure_class,
            error.exit_code,
            _sentence(error),
            is_collateral=isinstance(error, LostRankError),
        )
    text = str(error).lower()
    if is_out_of_memory(error):
        what, advice = (
            "out of memory",
            "lower spec.training.microBatchSize or spec.training.maxSeqLength, or set "
            "spec.strategy.activationCheckpointing to full",
        )
        if _LOADING in getattr(error, "__notes__", ()):
            what, advice = (
                f"out of memory {_LOADING}",
                "use GPUs with more memory, spec.strategy.type fsdp on several GPUs, or "
                "spec.method.quantization nf4",
            )
        message = f"{what}: {_sentence(error)}; {advice}"
        return Verdict(
            FailureClass.OUT_OF_MEMORY,
            ExitCode.KILLED,
            message,
            is_gpu_memory=is_out_of_gpu_memory(error),
        )
    if isinstance(error, RuntimeError) and any(phrase in text for phrase in _HANG_PHRASES):
        return Verdict(
            FailureClass.HUNG,
            ExitCode.ERROR,
            f"another rank did not enter a collective: {_sentence(error)}; see the logs of all "
            "ranks; with spec.deadlines.hangSeconds each rank writes its stacks before that",
            is_collateral=True,
        )
    # torch raises RuntimeError for lost peers; a ConnectionError of Python is about another host.
    if isinstance(error, RuntimeError) and _is_of_a_peer(text):
        return Verdict(
            FailureClass.WORKER_LOST,
            ExitCode.ERROR,
            f"lost the connection to another rank: {_sentence(error)}; see that rank's log",
            is_collateral=True,
        )
    return Verdict(
        FailureClass.ERROR,
        ExitCode.ERROR,
        f"{type(error).__name__}: {_sentence(error)}; the traceback is in the rank's log",
    )


def _is_of_a_peer(text: str) -> bool:
    """Whether a lower-case error text means that another rank is gone or does not respond."""
    if any(phrase in text for phrase in _LOST_PEER_PHRASES):
        return True
    _, is_there, added = text.partition(_SYSTEM_ERROR_OF_NCCL)
    added = added.partition(_LAST_ERROR_OF_NCCL.lower())[2]  # its name mentions malloc
    return bool(is_there) and not any(phrase in added for phrase in _OF_THIS_NODE)


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Whether torch's allocator found no memory on the GPU.

    Errors of CUDA and NCCL at their start are no reason to need less memory: another process has
    the memory.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this machine or its GPU ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")  # not imported: not an error of torch
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(p in text for p in _OUT_OF_MEMORY_PHRASES)


def guard(
    work: Callable[[], Termination],
    *,
    on_error: Callable[[Verdict, str], None] = lambda verdict, trace: None,
) -> tuple[Termination, Verdict | None]:
    """Run the work of a process; an exception becomes its termination and a verdict.

    `on_error` receives that verdict and the formatted traceback, for the log.
    """
    try:
        return work(), None
    # SystemExit and KeyboardInterrupt as well: a rank leaves only through its exit code.
    except BaseException as error:
        verdict = classify(error)
        on_error(verdict, "".join(traceback.format_exception(error)))
        termination = Termination(
            failure_class=verdict.failure_class,
            exit_code=verdict.exit_code,
            message=verdict.message,
            is_gpu_memory=verdict.is_gpu_memory or None,
        )
        return termination, verdict


def leave(code: int) -> NoReturn:
    """End this process with `code` immediately.

    All output is already written. An ordinary exit would run the destructors of gloo's threads,
    which abort the process (SIGABRT) after an error and sometimes after success.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _sentence(error: BaseException) -> str:
    """Return the first paragraph of the message; libraries add pages of C++ frames.

    NCCL gives the cause in the line after "Last error:".
    """
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = lines[0] if lines else type(error).__name__
    if _LAST_ERROR_OF_NCCL in lines[:-1]:
        text = f"{text}: {lines[lines.index(_LAST_ERROR_OF_NCCL) + 1]}".rstrip(": ")
    return text.rstrip(".")

"""Observe gloo's collectives at the call: sizes, starts, ends and waits.

Calls from Python are intercepted at the methods of `ProcessGroup` and `Work`. Calls of DDP's
reducer, which calls and waits in C++, are intercepted at the dispatcher. gloo's own recorder would
be free, but it records no times and reports a reduce_scatter as an all_reduce. During a
collective's call only its sequence number is counted; the rest happens in `read`, because code that
is not in the processor's cache takes many times as long.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.telemetry.collectives.groups import CHECKPOINT, GroupNames
from finetune_trainer.telemetry.collectives.sample import size_class
from finetune_trainer.telemetry.collectives.sizes import BARRIER, METHODS, Size
from finetune_trainer.telemetry.collectives.tally import Sequence, Tallies

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from finetune_trainer.telemetry.phases import PhaseClock
    from finetune_trainer.telemetry.slots import Block

_COMPUTED = frozenset((TimedPhase.FORWARD, TimedPhase.BACKWARD, TimedPhase.OPTIMIZER))
"""Phases of a step in which waits count as `comm_exposed`; elsewhere a wait belongs to its phase.
"""
_MIN_SECONDS_TO_MOVE = 0.01
"""Waiting seconds are moved to another phase once they exceed this; each move takes 20 µs."""
_MAX_UNREAD = 1000  # an evaluation may have many collectives and does not report steps


class _Kind(NamedTuple):
    """An operation on one gloo group."""

    op: str
    group: str
    num_ranks: int
    sequence: Sequence


# Plain tuples: creating an object would cost a call within each collective.
_InFlight = tuple["Work", _Kind, int, float, int, bool]
"""A collective started from Python: work, kind, sequence number, start in seconds of
`perf_counter`, bytes, whether it is synchronous.
"""
_Finished = tuple[_Kind, int, float | None, float | None]
"""A collective that Python has waited for or abandoned: kind, bytes, seconds, exposed seconds."""


class _Bucket:
    """Times of a bucket that DDP reduces, in seconds of `perf_counter`; 0 until known."""

    __slots__ = ("_sequence", "ended", "launched", "num_bytes", "number", "started")

    def __init__(self, sequence: Sequence, number: int, started: float) -> None:
        self._sequence, self.number, self.started = sequence, number, started
        self.num_bytes, self.launched, self.ended = 0, 0.0, 0.0

    def end(self, _: object) -> None:
        """Record the end, from a gloo thread."""
        self.ended = time.perf_counter()
        self._sequence.end(self.number)


class Interception:
    """Counts in `tallies` while it is entered; at most one per process.

    Attributes:
        waited_seconds: Time in which the rank could do nothing else, without checkpoints.
    """

    def __init__(
        self,
        block: "Block",
        tallies: Tallies,
        names: GroupNames,
        *,
        is_ddp: bool,
        phases: "PhaseClock | None" = None,
    ) -> None:
        """Prepare for DDP or another strategy; `phases` receives the waiting time."""
        self.waited_seconds = 0.0
        self._unmoved_seconds = 0.0
        self._block = block
        self._tallies = tallies
        self._names = names
        self._is_ddp = is_ddp
        self._phases = phases
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._finished: deque[_Finished] = deque()
        self._buckets: list[_Bucket] = []
        self._reduced: _Kind | None = None
        self._backwards: list[list[_Bucket]] = []
        self._reduced_buckets: list[list[_Bucket]] = []
        self._undo: list[Callable[[], object]] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        """Patch torch's methods for all groups of this process."""
        import torch
        from torch.distributed import ProcessGroup, Work

        for name, (op, size) in METHODS.items():
            is_seen_below = self._is_ddp and name == "allreduce"
            ours = self._begin_with(getattr(ProcessGroup, name), op, size, is_seen_below)
            self._replace(ProcessGroup, name, ours)
        self._replace(Work, "wait", self._wait_with(Work.wait))
        if self._is_ddp:
            library = torch.library.Library("c10d", "IMPL")
            self._undo.append(library._destroy)
            reduce = self._reduce_with(torch.ops.c10d.allreduce_.default.redispatch)
            library.impl("allreduce_", reduce, "AutogradCPU", with_keyset=True)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore torch's methods."""
        while self._undo:
            self._undo.pop()()
        self._in_flight.clear()

    def end_backward(self) -> None:
        """End the buckets of the current backward pass.

        Its last bucket is launched when all gradients are ready; from then on the rank waits.
        """
        if self._buckets:
            self._backwards.append(self._buckets)
            self._buckets = []
        while self._backwards:
            buckets, ended = self._backwards[0], 0.0
            for bucket in buckets:
                if not bucket.ended:
                    return
                ended = max(ended, bucket.ended)
            del self._backwards[0]
            self._reduced_buckets.append(buckets)
            waited = ended - buckets[-1].launched
            if waited > 0:
                self.waited_seconds += waited
                self._unmoved_seconds += waited
                if self._unmoved_seconds > _MIN_SECONDS_TO_MOVE:
                    self._move()

    def _move(self) -> None:
        """Move the time that DDP waited from the backward phase to `comm_exposed`."""
        if self._phases is not None:
            moved = self._unmoved_seconds
            self._phases.move(TimedPhase.BACKWARD, TimedPhase.COMM_EXPOSED, moved)
        self._unmoved_seconds = 0.0

    def read(self) -> None:
        """Count the collectives that finished since the last call, from the training thread."""
        for key, (work, kind, number, _, num_bytes, _) in list(self._in_flight.items()):
            if work.is_completed():  # not waited for so far
                del self._in_flight[key]
                kind.sequence.end(number)
                self._finished.append((kind, num_bytes, None, None))
        for _ in range(len(self._finished)):
            self._count(*self._finished.popleft())
        self.end_backward()
        if self._unmoved_seconds > 0:
            self._move()
        for buckets in self._reduced_buckets:
            self._count_backward(buckets)
        self._reduced_buckets.clear()

    def _count(
        self, kind: _Kind, num_bytes: int, seconds: float | None, exposed: float | None
    ) -> None:
        if kind.op == BARRIER:
            return
        tally = self._tallies.of(kind.op, kind.group, size_class(num_bytes), kind.num_ranks)
        if tally is not None:
            tally.count(num_bytes, seconds)
            if exposed is not None:
                tally.expose(exposed)

    def _count_backward(self, buckets: list[_Bucket]) -> None:
        """Count the buckets of a backward pass, each with the wait that it adds."""
        assert self._reduced is not None, "it was found with the first bucket"
        waited_from = buckets[-1].launched
        for bucket in sorted(buckets, key=lambda one: one.ended):
            exposed = max(0.0, bucket.ended - waited_from)
            self._count(self._reduced, bucket.num_bytes, bucket.ended - bucket.started, exposed)
            waited_from += exposed

    def _replace(self, owner: type, name: str, ours: object) -> None:
        original = vars(owner)[name]  # from `vars`: getattr would return a plain function
        setattr(owner, name, ours)
        self._undo.append(lambda: setattr(owner, name, original))

    def _begin_with(
        self, original: Callable[..., Any], op: str, size: Size, is_seen_below: bool = False
    ) -> Callable[..., Any]:
        if is_seen_below:
            original = _below_autograd(original)
        kinds: dict[ProcessGroup, _Kind | None] = {}
        clock, flying = time.perf_counter, self._in_flight

        def begin(group: "ProcessGroup", *args: Any, **options: Any) -> Any:
            try:
                kind = kinds[group]
            except KeyError:
                kind = kinds[group] = self._kind(op, group)
            if kind is None:
                return original(group, *args, **options)
            number, started = kind.sequence.begin(), clock()
            work = original(group, *args, **options)
            if work is not None:
                asked = args[-1] if args else options.get("opts")
                is_sync = not getattr(asked, "asyncOp", True)
                num_bytes = size(kind.num_ranks, *args)
                flying[id(work)] = (work, kind, number, started, num_bytes, is_sync)
            return work

        return begin

    def _wait_with(self, original: Callable[..., bool]) -> Callable[..., bool]:
        clock, this_thread = time.perf_counter, threading.get_ident
        flying, over, phases = self._in_flight, self._finished, self._phases

        def wait(work: "Work", *args: Any, **options: Any) -> bool:
            begun = flying.pop(id(work), None)
            if begun is None:
                return original(work, *args, **options)
            _, kind, number, started, num_bytes, is_waited_for_at_once = begun
            is_held_up = this_thread() == self._thread  # other threads do not delay training
            if not is_waited_for_at_once and work.is_completed():
                result = original(work, *args, **options)
                seconds, exposed = None, 0.0  # end unknown, no wait
            else:
                before = None
                if phases is not None and is_held_up and phases.phase in _COMPUTED:
                    before = phases.enter(TimedPhase.COMM_EXPOSED)
                asked = clock()
                result = original(work, *args, **options)
                now = clock()
                if before is not None and phases is not None:
                    phases.enter(before)
                seconds, exposed = now - started, now - asked
                if is_held_up and kind.group != CHECKPOINT:
                    self.waited_seconds += exposed
            kind.sequence.end(number)
            over.append((kind, num_bytes, seconds, exposed if is_held_up else None))
            if is_held_up and len(over) > _MAX_UNREAD:
                self.read()
            return result

        return wait

    def _reduce_with(self, redispatch: Callable[..., Any]) -> Callable[..., Any]:
        import torch
        from torch.distributed import ProcessGroup, Work

        clock, unbox = time.perf_counter, Work.unbox
        kind: _Kind | None = None
        below: Any = None

        def reduce(keys: Any, tensors: "list[torch.Tensor]", boxed: Any, *rest: Any) -> Any:
            nonlocal kind, below
            if below is None:  # only DDP calls this, with one group and device
                below = keys & torch._C._after_autograd_keyset
                kind = self._reduced = self._kind("all_reduce", ProcessGroup.unbox(boxed))
            if kind is None:
                return redispatch(below, tensors, boxed, *rest)
            bucket = _Bucket(kind.sequence, kind.sequence.begin(), clock())
            result = redispatch(below, tensors, boxed, *rest)
            unbox(result[1]).get_future().add_done_callback(bucket.end)
            bucket.num_bytes, bucket.launched = tensors[0].nbytes, clock()
            self._buckets.append(bucket)
            return result

        return reduce

    def _kind(self, op: str, group: "ProcessGroup") -> _Kind | None:
        """Return the kind of an operation on a group; None if it is not counted here."""
        import torch.distributed as dist

        name = self._names.of(group.group_desc)
        if name is None or group.size() == 1 or dist.get_backend(group) != "gloo":
            return None
        if name not in self._sequences:  # groups of one name share sequence numbers
            self._sequences[name] = Sequence(self._block, name)
        return _Kind(op, name, group.size(), self._sequences[name])


def _below_autograd(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call so that the dispatcher skips autograd's kernels, including our own."""
    import torch

    below = torch._C._AutoDispatchBelowAutograd

    def pass_by(*args: Any, **options: Any) -> Any:
        with below():
            return call(*args, **options)

    return pass_by

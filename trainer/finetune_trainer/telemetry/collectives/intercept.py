"""Sees gloo's collectives where they are asked for: sizes, starts, ends and waits.

Python code is seen at the methods of `ProcessGroup` and `Work`, which costs 1 to 3 us; DDP's
reducer, which calls and waits in C++, at the dispatcher, which costs 15 to 20 us a bucket. gloo's
own recorder would cost nothing, but it knows no times, and calls a reduce_scatter an all_reduce.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.telemetry.collectives.groups import GroupNames
from finetune_trainer.telemetry.collectives.sample import size_class
from finetune_trainer.telemetry.collectives.sizes import BARRIER, METHODS, Size
from finetune_trainer.telemetry.collectives.tally import Sequence, Tallies, Tally

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from finetune_trainer.telemetry.phases import PhaseClock
    from finetune_trainer.telemetry.slots import Block

_COMPUTED = frozenset((TimedPhase.FORWARD, TimedPhase.BACKWARD, TimedPhase.OPTIMIZER))
"""Phases of a step whose waits are of `comm_exposed`; what else waits goes on being what it is."""


class _Group:
    """What is known of one group of gloo's."""

    __slots__ = ("name", "num_ranks", "sequence")

    def __init__(self, name: str, num_ranks: int, sequence: Sequence) -> None:
        self.name, self.num_ranks, self.sequence = name, num_ranks, sequence


class _Flying(NamedTuple):
    """A collective that Python code has begun, and will wait for."""

    work: "Work"
    group: _Group
    tally: Tally | None
    num_bytes: int
    number: int
    started: float
    is_waited_for_at_once: bool


@dataclass(slots=True)
class _Bucket:
    """A bucket of DDP's; times in seconds of `time.perf_counter`."""

    tally: Tally
    num_bytes: int
    started: float
    launched: float = 0.0
    ended: float = 0.0


class Interception:
    """Counts in `tallies` while it is entered; at most one may be in a process."""

    def __init__(
        self,
        block: "Block",
        tallies: Tallies,
        names: GroupNames,
        *,
        is_ddp: bool,
        phases: "PhaseClock | None" = None,
    ) -> None:
        """Prepare for DDP or another strategy; `phases` is told when the rank waits."""
        self._block = block
        self._is_ddp = is_ddp
        self._phases = phases
        self._tallies = tallies
        self._names = names
        self._groups: dict[ProcessGroup, _Group | None] = {}
        self._sequences: dict[str, Sequence] = {}
        self._flying: dict[int, _Flying] = {}
        self._buckets: deque[_Bucket] = deque()
        self._undo: list[Callable[[], object]] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        """Take over torch's methods, for all groups of this process."""
        import torch
        from torch.distributed import ProcessGroup, Work

        for name, (op, size) in METHODS.items():
            original = getattr(ProcessGroup, name)
            if self._is_ddp and name == "allreduce":
                original = _past_the_dispatcher(original)
            self._replace(ProcessGroup, name, self._begin_with(original, op, size))
        self._replace(Work, "wait", self._wait_with(Work.wait))
        if self._is_ddp:
            library = torch.library.Library("c10d", "IMPL")
            self._undo.append(library._destroy)
            reduce = self._reduce_with(torch.ops.c10d.allreduce_.default.redispatch)
            library.impl("allreduce_", reduce, "AutogradCPU", with_keyset=True)
        return self

    def __exit__(self, *error: object) -> None:
        """Give the methods back, and let go of the groups."""
        while self._undo:
            self._undo.pop()()
        self._groups.clear()
        self._flying.clear()

    def read(self) -> None:
        """Take over what came to light since the last call; once a step, from the loop's thread."""
        for key, flying in list(self._flying.items()):
            if flying.work.is_completed():  # nobody has waited for it yet, if ever
                flying.group.sequence.end(flying.number)
                del self._flying[key]
        exposed = _expose([self._buckets.popleft() for _ in range(len(self._buckets))])
        if self._phases is not None and exposed > 0:
            self._phases.move(TimedPhase.BACKWARD, TimedPhase.COMM_EXPOSED, exposed)

    def _replace(self, owner: type, name: str, ours: object) -> None:
        original = vars(owner)[name]  # not what getattr returns: that would be no method any more
        setattr(owner, name, ours)
        self._undo.append(lambda: setattr(owner, name, original))

    def _begin_with(self, original: Callable[..., Any], op: str, size: Size) -> Callable[..., Any]:
        known, clock, flying = self._groups, time.perf_counter, self._flying

        def begin(group: "ProcessGroup", *args: Any, **options: Any) -> Any:
            seen = known[group] if group in known else self._know(group)
            if seen is None:
                return original(group, *args, **options)
            num_bytes = size(seen.num_ranks, *args)
            tally = self._count(seen, op, num_bytes)
            number = seen.sequence.begin()
            started = clock()
            work = original(group, *args, **options)
            if work is not None:
                asked = args[-1] if args else options.get("opts")
                is_sync = not getattr(asked, "asyncOp", True)
                flying[id(work)] = _Flying(work, seen, tally, num_bytes, number, started, is_sync)
            return work

        return begin

    def _wait_with(self, original: Callable[..., bool]) -> Callable[..., bool]:
        clock, flying = time.perf_counter, self._flying

        def wait(work: "Work", *args: Any, **options: Any) -> bool:
            begun = flying.pop(id(work), None)
            if begun is None:
                return original(work, *args, **options)
            was_over = work.is_completed()
            is_held_up = threading.get_ident() == self._thread  # else no training waits for it
            before = self._wait_begins() if is_held_up else None
            asked = clock()
            answer = original(work, *args, **options)
            now = clock()
            if before is not None and self._phases is not None:
                self._phases.enter(before)
            begun.group.sequence.end(begun.number)
            if begun.tally is not None:
                # Of one that ended unobserved nobody knows when, unless this call began it, too.
                if not was_over or begun.is_waited_for_at_once:
                    begun.tally.took(now - begun.started, begun.num_bytes)
                if is_held_up:
                    begun.tally.exposed(now - asked)
            return answer

        return wait

    def _reduce_with(self, redispatch: Callable[..., Any]) -> Callable[..., Any]:
        import torch
        from torch.distributed import ProcessGroup, Work

        below = torch._C._after_autograd_keyset
        known, clock, buckets = self._groups, time.perf_counter, self._buckets

        def reduce(keys: Any, tensors: "list[torch.Tensor]", boxed: Any, *rest: Any) -> Any:
            group = ProcessGroup.unbox(boxed)
            seen = known[group] if group in known else self._know(group)
            if seen is None:
                return redispatch(keys & below, tensors, boxed, *rest)
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            tally = self._count(seen, "all_reduce", num_bytes)
            sequence = seen.sequence
            number = sequence.begin()
            bucket = _Bucket(tally, num_bytes, clock()) if tally is not None else None
            result = redispatch(keys & below, tensors, boxed, *rest)

            def end(_: object) -> None:  # in a thread of gloo's
                if bucket is not None:
                    bucket.ended = clock()
                    buckets.append(bucket)
                sequence.end(number)

            Work.unbox(result[1]).get_future().add_done_callback(end)
            if bucket is not None:
                bucket.launched = clock()
            return result

        return reduce

    def _wait_begins(self) -> TimedPhase | None:
        """Say so to the phases where a step is computed, and return what was done before."""
        if self._phases is None or self._phases.phase not in _COMPUTED:
            return None
        return self._phases.enter(TimedPhase.COMM_EXPOSED)

    def _count(self, group: _Group, op: str, num_bytes: int) -> Tally | None:
        if op == BARRIER:
            return None
        size = size_class(num_bytes)
        tally = self._tallies.of(op, group.name, size, group.num_ranks)
        if tally is not None:
            tally.count(num_bytes)
        elif self._tallies.is_counting:
            self._tallies.num_missed += 1
        return tally

    def _know(self, group: "ProcessGroup") -> _Group | None:
        """Return what counts for a group; None where another source does, or nobody."""
        import torch.distributed as dist

        name = self._names.of(group.group_desc)
        found = None
        if name is not None and group.size() > 1 and dist.get_backend(group) == "gloo":
            sequence = self._sequences.get(name)
            if sequence is None:  # groups of one name have one row of numbers
                sequence = self._sequences[name] = Sequence(self._block, name)
            found = _Group(name, group.size(), sequence)
        self._groups[group] = found
        return found


def _past_the_dispatcher(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that the dispatcher takes at once to what is below autograd, and us."""
    import torch

    below = torch._C._AutoDispatchBelowAutograd

    def pass_by(*args: Any, **options: Any) -> Any:
        with below():
            return call(*args, **options)

    return pass_by


def _expose(buckets: list[_Bucket]) -> float:
    """Count the times of one backward's buckets, and return how long the rank waited for them.

    The last of them is launched when all gradients are there; from then on the rank only waits.
    """
    waited_from = max((bucket.launched for bucket in buckets), default=0.0)
    total = 0.0
    for bucket in sorted(buckets, key=lambda one: one.ended):
        bucket.tally.took(bucket.ended - bucket.started, bucket.num_bytes)
        exposed = max(0.0, bucket.ended - waited_from)
        bucket.tally.exposed(exposed)
        waited_from = max(waited_from, bucket.ended)
        total += exposed
    return total

"""Sees gloo's collectives where they are asked for: sizes, starts, ends and waits.

Python code is seen at the methods of `ProcessGroup` and `Work`, which costs 1 to 3 us; DDP's
reducer, which calls from C++, at torch's dispatcher, which costs 15 to 20 us a bucket. gloo's own
recorder would cost nothing, but it knows no times, and calls a reduce_scatter an all_reduce.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from finetune_trainer.telemetry.collectives.groups import GroupNames
from finetune_trainer.telemetry.collectives.sample import Backward, size_class
from finetune_trainer.telemetry.collectives.sizes import BARRIER, METHODS, Size
from finetune_trainer.telemetry.collectives.tally import Sequence, Tallies, Tally

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from finetune_trainer.telemetry.slots import Block


class _Group:
    """What is known of one group of gloo's."""

    __slots__ = ("is_called_from_python", "name", "num_ranks", "sequence")

    def __init__(self, name: str, num_ranks: int, sequence: Sequence) -> None:
        self.name, self.num_ranks, self.sequence = name, num_ranks, sequence
        self.is_called_from_python = False


class _Flying:
    """A collective that Python code has begun, and will wait for."""

    __slots__ = ("group", "is_waited_for_at_once", "number", "started", "tally", "work")

    def __init__(
        self,
        work: "Work",
        group: _Group,
        tally: Tally | None,
        number: int,
        started: float,
        *,
        is_waited_for_at_once: bool,
    ) -> None:
        self.work, self.group, self.tally, self.number = work, group, tally, number
        self.started, self.is_waited_for_at_once = started, is_waited_for_at_once


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket of DDP's that is reduced; seconds since the epoch, as those of `Backward`."""

    tally: Tally
    started: float
    ended: float


class Interception:
    """Counts in `tallies` while it is entered; at most one may be in a process."""

    def __init__(self, block: "Block", tallies: Tallies, names: GroupNames) -> None:
        self._block = block
        self._tallies = tallies
        self._names = names
        self._groups: dict[ProcessGroup, _Group | None] = {}
        self._sequences: dict[str, Sequence] = {}
        self._flying: dict[int, _Flying] = {}
        self._buckets: deque[_Bucket] = deque()
        self._newest = Backward(0.0, 0.0)
        self._undo: list[Callable[[], object]] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        """Take over torch's methods, for all groups of this process."""
        import torch
        from torch.distributed import ProcessGroup, Work

        for name, (op, size) in METHODS.items():
            original = getattr(ProcessGroup, name)
            self._replace(ProcessGroup, name, self._begin_with(original, op, size))
        self._replace(Work, "wait", self._wait_with(Work.wait))
        library = torch.library.Library("c10d", "IMPL")
        reduce = torch.ops.c10d.allreduce_.default.redispatch
        library.impl("allreduce_", self._reduce_with(reduce), "AutogradCPU", with_keyset=True)
        self._undo.append(library._destroy)
        return self

    def __exit__(self, *error: object) -> None:
        """Give the methods back, and let go of the groups."""
        while self._undo:
            self._undo.pop()()
        self._groups.clear()
        self._flying.clear()

    def read(self, backward: Backward | None) -> None:
        """Take over what came to light since the last call; once a step, from the loop's thread."""
        for key, flying in list(self._flying.items()):
            if flying.work.is_completed():  # nobody has waited for it yet, if ever
                flying.group.sequence.end(flying.number)
                del self._flying[key]
        done = [self._buckets.popleft() for _ in range(len(self._buckets))]
        for bucket in done:
            bucket.tally.took(bucket.ended - bucket.started)
        if backward is not None and backward != self._newest:
            self._newest = backward
            _expose(done, backward)

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
            tally = self._count(seen, op, size(seen.num_ranks, *args))
            number = seen.sequence.begin()
            started = clock()
            seen.is_called_from_python = True
            try:
                work = original(group, *args, **options)
            finally:
                seen.is_called_from_python = False
            if work is not None:
                asked = args[-1] if args else options.get("opts")
                is_sync = not getattr(asked, "asyncOp", True)
                flying[id(work)] = _Flying(
                    work, seen, tally, number, started, is_waited_for_at_once=is_sync
                )
            return work

        return begin

    def _wait_with(self, original: Callable[..., bool]) -> Callable[..., bool]:
        clock, flying = time.perf_counter, self._flying

        def wait(work: "Work", *args: Any, **options: Any) -> bool:
            begun = flying.pop(id(work), None)
            if begun is None:
                return original(work, *args, **options)
            was_over = work.is_completed()
            asked = clock()
            answer = original(work, *args, **options)
            now = clock()
            begun.group.sequence.end(begun.number)
            if begun.tally is not None:
                # Of one that ended unobserved nobody knows when, unless this call began it, too.
                if not was_over or begun.is_waited_for_at_once:
                    begun.tally.took(now - begun.started)
                if threading.get_ident() == self._thread:  # else it held up no training
                    begun.tally.exposed(now - asked)
            return answer

        return wait

    def _reduce_with(self, redispatch: Callable[..., Any]) -> Callable[..., Any]:
        import torch
        from torch.distributed import ProcessGroup, Work

        below = torch._C._after_autograd_keyset
        known, clock, buckets = self._groups, time.time, self._buckets

        def reduce(keys: Any, tensors: "list[torch.Tensor]", boxed: Any, *rest: Any) -> Any:
            group = ProcessGroup.unbox(boxed)
            seen = known[group] if group in known else self._know(group)
            if seen is None or seen.is_called_from_python:
                return redispatch(keys & below, tensors, boxed, *rest)
            tally = self._count(seen, "all_reduce", sum(tensor.nbytes for tensor in tensors))
            sequence = seen.sequence
            number = sequence.begin()
            started = clock()
            result = redispatch(keys & below, tensors, boxed, *rest)

            def end(_: object) -> None:  # in a thread of gloo's
                if tally is not None:
                    buckets.append(_Bucket(tally, started, clock()))
                sequence.end(number)

            Work.unbox(result[1]).get_future().add_done_callback(end)
            return result

        return reduce

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


def _expose(buckets: list[_Bucket], backward: Backward) -> None:
    """Divide the time between `computed` and `reduced` among the buckets that it was waited for."""
    waited_from = backward.computed
    for bucket in sorted(buckets, key=lambda one: one.ended):
        until = min(bucket.ended, backward.reduced)
        bucket.tally.exposed(max(0.0, until - waited_from))
        waited_from = max(waited_from, until)

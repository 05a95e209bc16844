"""Count NCCL's collectives with torch's flight recorder, which NCCL's process groups fill.

Collectives themselves get no overhead. Reading the ring takes time per entry (15 to 20 ms for
2,000 of gloo's), so a share of the wall time limits how often it is read. Entries that are
overwritten between two readings are missing; `finetune_comm_sampled_ratio` reports their share.
"""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from finetune_trainer.telemetry.collectives.dump import Dump, Recorded, UnknownDumpError, read_dump
from finetune_trainer.telemetry.collectives.groups import GroupNames
from finetune_trainer.telemetry.collectives.sample import Sample
from finetune_trainer.telemetry.collectives.tally import Sequence, Tallies

if TYPE_CHECKING:
    from finetune_trainer.telemetry.slots import Block

MAX_TIME_SHARE = 0.0005
"""Share of the wall time that reading the ring may take."""
_SECONDS_BETWEEN_RINGS = 1.0

Recorder = Callable[[bool], bytes]
"""Return the recorder's contents as a pickle; ring entries only on request."""


def recorder_of_nccl() -> Recorder:
    """Return a reader of torch's recorder.

    The reader raises `UnknownDumpError` if this torch has no recorder for NCCL.
    """
    import torch

    def dump(with_ring: bool) -> bytes:
        of_torch = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if of_torch is None:
            raise UnknownDumpError("this build of torch has no flight recorder for NCCL")
        try:
            # The other arguments are: include stack traces, only active entries.
            pickled: bytes = of_torch(with_ring, False, False)
        except (RuntimeError, TypeError) as error:
            raise UnknownDumpError(str(error)) from error
        return pickled

    return dump


def enable_timing() -> None:
    """Enable timing of NCCL's collectives in the groups that this process creates from now on.

    Each collective then has two more events on its stream, which can prevent overlap with others.
    """
    os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"


class FlightRecorder:
    """Counts the recorder's collectives in `tallies`."""

    def __init__(
        self,
        block: "Block",
        tallies: Tallies,
        names: GroupNames,
        *,
        recorder: Recorder,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare; `clock` is in seconds."""
        self._block = block
        self._tallies = tallies
        self._names = names
        self._recorder: Recorder | None = recorder
        self._warn = warn
        self._clock = clock
        self._ring_at = float("-inf")
        self._newest_id = -1
        self._pending: set[int] = set()
        self._group_of: dict[str, str] = {}
        self._sequences: dict[str, Sequence] = {}

    def read(self, *, is_last: bool = False) -> None:
        """Read the newest sequence numbers, and the ring if it is due.

        Called every step, so that a stuck rank can be compared with its peers, and at the end.
        """
        now = self._clock()
        wants_ring = is_last or now >= self._ring_at
        if self._recorder is None:
            return
        try:
            dump = read_dump(self._recorder(wants_ring))
        except UnknownDumpError as error:
            self._recorder = None
            self._warn(
                f"torch's flight recorder of NCCL cannot be read ({error}); training continues, "
                "and finetune_comm_* lack the collectives of NCCL"
            )
            return
        if wants_ring:
            self._take(dump)
        self._publish_sequences(dump)
        if wants_ring:
            then = self._clock()
            self._ring_at = then + max(_SECONDS_BETWEEN_RINGS, (then - now) / MAX_TIME_SHARE)

    def _take(self, dump: Dump) -> None:
        """Count finished collectives that are not counted yet, except those from before `begin`."""
        self._group_of |= {one.group_id: one.group for one in dump.collectives}
        if dump.ids is None:
            return
        oldest, newest = dump.ids
        before, self._newest_id = self._newest_id, newest
        if not self._tallies.is_counting:
            return
        if newest < before:  # it was emptied and restarts at 0
            before, self._pending = -1, set()
        lost = {one for one in self._pending if one < oldest}
        self._pending -= lost
        self._tallies.num_missed += len(lost) + max(0, oldest - 1 - before)
        for one in dump.collectives:
            if one.last_id <= before and one.last_id not in self._pending:
                continue
            if one.is_over:
                self._pending.discard(one.last_id)
                self._count(one)
            else:
                self._pending.add(one.last_id)

    def _count(self, one: Recorded) -> None:
        name = self._names.of(one.group)
        if one.op is None or name is None or one.num_ranks == 1:
            return
        if one.num_bytes is None:
            self._tallies.num_missed += 1
            return
        self._tallies.add(Sample(one.op, name, one.num_ranks, one.num_bytes, one.seconds))

    def _publish_sequences(self, dump: Dump) -> None:
        """Publish the newest sequence numbers of each name, summed over its groups."""
        newest: dict[str, tuple[int, int]] = {}
        for group, (enqueued, completed) in dump.progress.items():
            name = self._names.of(self._group_of.get(group, ""))
            if name is not None:
                before = newest.get(name, (0, 0))
                newest[name] = before[0] + max(0, enqueued), before[1] + max(0, completed)
        for name, (enqueued, completed) in newest.items():
            if name not in self._sequences:
                self._sequences[name] = Sequence(self._block, name)
            self._sequences[name].is_at(enqueued, completed)

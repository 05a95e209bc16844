"""Collect the stacks and collectives of a node's ranks during a stall, before any rank is killed.

They are stored in a folder per stall, in the logs of the attempt. A thread collects them, because
disks and ranks may not respond.
"""

import gzip
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread

from finetune_trainer.config.log_folders import log_folder
from finetune_trainer.telemetry.node.node_ranks import NodeRanks, RankNow
from finetune_trainer.telemetry.node.recorder_client import query_recorder
from finetune_trainer.telemetry.processes import PROCESS_STATES, threads_of
from finetune_trainer.telemetry.slots import Word
from finetune_trainer.telemetry.witness import STACKS_SIGNAL, recorder_socket, stacks_file

MAX_STALLS = 3
_SECONDS_FOR_STACKS = 10.0
_SECONDS_OF_QUIET = 0.3  # without new output, after which stacks count as complete
_POLL_SECONDS = 0.05
_MAX_STACKS_BYTES = 1 << 20


def evidence_folder(ranks: Sequence[RankNow], attempt: int, stall: int) -> str:
    """Return the folder of a stall's evidence, relative to the run directory."""
    generation = max((int(one.numbers[Word.GENERATION]) for one in ranks), default=1)
    return str(log_folder(Path(), attempt, generation) / f"stall-{stall}")


class Evidence:
    """Collects evidence of the first few stalls of an attempt, one at a time."""

    def __init__(self, ranks: NodeRanks, folder: Path, run_dir: Path, attempt: int) -> None:
        """Prepare; `folder` is shared by the ranks and their page."""
        self._ranks, self._folder = ranks, folder
        self._run_dir, self._attempt = run_dir, attempt
        self._stall = 0
        self._thread: Thread | None = None

    def collect(self, stall: int) -> None:
        """Start to collect for a stall, once per stall; return at once."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if stall <= self._stall or stall > MAX_STALLS or is_busy:
            return
        self._stall = stall
        # The interpreter prints exceptions of the thread into the log of the node.
        self._thread = Thread(target=self._collect, args=(stall,), name="evidence", daemon=True)
        self._thread.start()

    def _collect(self, stall: int) -> None:
        ranks = self._ranks.now()
        before = {one.rank: self._size(one.rank) for one in ranks}
        self._wait_for_stacks(before, [one.rank for one in ranks if _request_stacks(one)])
        target = self._run_dir / evidence_folder(ranks, self._attempt, stall)
        target.mkdir(parents=True, exist_ok=True)
        for one in ranks:
            text = _state(one).encode() + self._stacks(one.rank, before[one.rank])
            _put(target / f"rank-{one.rank}.stacks.txt", text)
        for one in ranks:
            dump = query_recorder(self._folder / recorder_socket(one.rank))
            if dump is not None:
                path = target / f"rank-{one.rank}.collectives.json.gz"
                _put(path, gzip.compress(dump))

    def _wait_for_stacks(self, before: Mapping[int, int], asked: list[int]) -> None:
        """Wait until all `asked` ranks have written their stacks, or the deadline has passed."""
        deadline = time.monotonic() + _SECONDS_FOR_STACKS
        sizes, changed = dict(before), time.monotonic()
        while time.monotonic() < deadline:
            newer = {rank: self._size(rank) for rank in asked}
            if newer != {rank: sizes[rank] for rank in asked}:
                sizes, changed = {**sizes, **newer}, time.monotonic()
            has_all = all(sizes[rank] > before[rank] for rank in asked)
            if has_all and time.monotonic() - changed > _SECONDS_OF_QUIET:
                return
            time.sleep(_POLL_SECONDS)

    def _size(self, rank: int) -> int:
        try:
            return (self._folder / stacks_file(rank)).stat().st_size
        except FileNotFoundError:
            return 0

    def _stacks(self, rank: int, begin: int) -> bytes:
        try:
            with (self._folder / stacks_file(rank)).open("rb") as file:
                file.seek(begin)
                return file.read(_MAX_STACKS_BYTES) or b"the rank has written no stacks\n"
        except FileNotFoundError:
            return b"the rank cannot write stacks\n"


def _put(path: Path, content: bytes) -> None:
    """Write a file that appears only when complete."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def _request_stacks(rank: RankNow) -> bool:
    """Signal a rank to write its stacks; return whether it was signalled and can respond.

    The signal would kill a process that has not registered its handler yet.
    """
    pid = int(rank.numbers[Word.WITNESS_PID])
    if rank.process is None or rank.process.pid != pid or rank.process.state in "Tt":
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # Checked after opening, so the descriptor does not belong to a later process.
        if rank.is_same_process():
            signal.pidfd_send_signal(descriptor, STACKS_SIGNAL)
            return True
    except ProcessLookupError:
        pass  # ended meanwhile
    finally:
        os.close(descriptor)
    return False


def _state(rank: RankNow) -> str:
    """Describe a rank's process and its threads by the kernel's data."""
    if rank.process is None:
        return f"rank {rank.rank}: its process is gone\n"
    process = rank.process
    lines = [
        f"rank {rank.rank}: process {process.pid} is {PROCESS_STATES.get(process.state, '?')}, in "
        f"state {process.state}",
        *(f"thread {one.id} {one.name}: {one.state} {one.waits_in}" for one in threads_of(process)),
    ]
    return "\n".join(lines) + "\n\n"

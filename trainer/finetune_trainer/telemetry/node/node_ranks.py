"""Read the shared state of this node's ranks at each request."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from finetune_trainer.config import metrics
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.telemetry.phases import read_phases
from finetune_trainer.telemetry.processes import Process, read_process
from finetune_trainer.telemetry.profile_requests import request_profile
from finetune_trainer.telemetry.shared import PROGRESS_FILE, block_file, info_file
from finetune_trainer.telemetry.slots import Block, Word


@dataclass(frozen=True)
class RankNow:
    """State of one rank that has begun, at one moment.

    Attributes:
        numbers: Numbers of its block.
        age_seconds: Time since its last report.
        resident_bytes: Memory of its process; None if the process is gone.
        phase_seconds: Wall time by phase up to now; if the process is gone, up to when it was last
            seen.
        process: Its process; None if it is gone.
        info: Values of the labels of `metrics.INFO` after the rank; None before they are published.
    """

    rank: int
    numbers: Sequence[float]
    age_seconds: float
    resident_bytes: int | None
    phase_seconds: Mapping[TimedPhase, float]
    process: Process | None
    info: Mapping[str, str] | None

    def is_same_process(self) -> bool:
        """Check whether its process still runs."""
        now = read_process(int(self.numbers[Word.PID]))
        return now is not None and now.start == self.numbers[Word.PROCESS_START]


class NodeRanks:
    """Ranks of one node, some of which may not have begun."""

    def __init__(
        self, folder: Path, ranks: Sequence[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open no file yet; `clock` must be the clock that writes `Word.SEEN_AT`."""
        self._folder = folder
        self._ranks = ranks
        self._clock = clock
        self._mapped: dict[int, tuple[int, Block]] = {}
        self._phase_seconds: dict[int, dict[TimedPhase, float]] = {}
        self._writing = Lock()  # requests run in threads

    @property
    def has_rank_zero(self) -> bool:
        """Whether rank 0 runs on this node."""
        return 0 in self._ranks

    def now(self) -> list[RankNow]:
        """Return every rank that has begun, in order."""
        blocks = ((rank, self._block(rank)) for rank in self._ranks)
        found = [self._read(rank, block) for rank, block in blocks if block is not None]
        return [one for one in found if one.numbers[Word.SEEN_AT] > 0]

    def progress(self) -> bytes | None:
        """Return the progress that rank 0 has published, as JSON; None before that."""
        try:
            return (self._folder / PROGRESS_FILE).read_bytes()
        except FileNotFoundError:
            return None

    def request_save(self) -> bool:
        """Request a checkpoint from rank 0; return whether it has begun and so sees the request."""
        block = self._block(0)
        if block is None:
            return False
        with self._writing:
            block.numbers[Word.SAVES_ASKED] += 1
        return True

    def request_profile(self, steps: int) -> bool | None:
        """Request a profile of `steps` steps from rank 0.

        Returns:
            False if one is already requested or recorded, None if rank 0 has not begun.
        """
        block = self._block(0)
        return None if block is None else request_profile(block, steps)

    def _read(self, rank: int, block: Block) -> RankNow:
        numbers, now = block.snapshot(), self._clock()
        process = read_process(int(numbers[Word.PID]))
        is_same = process is not None and process.start == numbers[Word.PROCESS_START]
        return RankNow(
            rank=rank,
            numbers=numbers,
            age_seconds=max(0.0, now - numbers[Word.SEEN_AT]),
            phase_seconds=self._phases(rank, numbers, now if is_same else None),
            resident_bytes=process.resident_bytes if process is not None and is_same else None,
            process=process if is_same else None,
            info=self._info(rank),
        )

    def _phases(
        self, rank: int, numbers: Sequence[float], now: float | None
    ) -> dict[TimedPhase, float]:
        """Return the seconds of each phase, never less than before; `now` is None if the rank died.

        A rank that leaves a phase reads the clock a moment before the new phase becomes visible.
        """
        found = read_phases(numbers, now)
        with self._writing:
            shown = self._phase_seconds.get(rank, found)
            self._phase_seconds[rank] = {one: max(found[one], shown[one]) for one in found}
            return self._phase_seconds[rank]

    def _block(self, rank: int) -> Block | None:
        path = self._folder / block_file(rank)
        try:
            inode = os.stat(path).st_ino
        except FileNotFoundError:
            return None
        known = self._mapped.get(rank)
        if known is not None and known[0] == inode:
            return known[1]
        block = Block.find(path)
        if block is not None:
            self._mapped[rank] = inode, block
        return block

    def _info(self, rank: int) -> dict[str, str] | None:
        try:
            labels = json.loads((self._folder / info_file(rank)).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        is_whole = isinstance(labels, dict) and tuple(labels) == metrics.INFO.label_names[1:]
        return labels if is_whole else None

"""Share a block of numbers and two texts of a rank with the page of its node.

All three are files in one folder in memory, created by the process that starts the page. Without
a page everything stays in this process.
"""

import os
import time
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import to_json

from finetune_trainer.config import ContractModel, TrackerRun
from finetune_trainer.files import replace_text
from finetune_trainer.telemetry.phases import PhaseClock
from finetune_trainer.telemetry.processes import process_start
from finetune_trainer.telemetry.slots import Block, Word
from finetune_trainer.telemetry.witness import Witness

ENV_NODE_PAGE = "FINETUNE_NODE_PAGE"  # a supervisor's `NodePage`, as JSON, for its ranks
PROGRESS_FILE = "progress.json"
_WARNINGS_FILE = "warnings.txt"  # of the page's and the trackers' process, one per line
_TRACKERS_FILE = "trackers.json"


class NodePage(ContractModel):
    """The page of this node as its ranks know it.

    Attributes:
        folder: Folder in which ranks leave the page's contents; None without a page.
        url: Address at which Prometheus finds the page, seen from this machine.
        warning: Why the page is at another port, or missing.
        first_rank: First rank of the node, which publishes the warning.
        word: Secret by which the page of rank 0's node recognises the job's other nodes; empty
            if it follows from the attempt's key, and None elsewhere.
    """

    folder: str | None = None
    url: str | None = None
    warning: str | None = None
    first_rank: int = 0
    word: str | None = None


class _TrackerRuns(ContractModel):
    """Content of the trackers' file."""

    runs: tuple[TrackerRun, ...]


class Shared:
    """Shared files of one rank."""

    def __init__(self, page: NodePage, rank: int) -> None:
        """Open the rank's block, with the numbers of an earlier process of this rank, if any.

        If the block cannot be opened, `warning` gives the reason and the page lacks this rank.
        """
        self._is_first = page.first_rank == rank
        self.warning = page.warning if self._is_first else None
        self.url = page.url
        self._rank = rank
        self._labels: dict[str, str] = {}
        self._folder = Path(page.folder) if page.folder is not None else None
        self.block = self._open()
        self._numbers = self.block.numbers
        # This is written before the new PID, so that the page still attributes the block to the old
        # process, whose running phase ends here.
        self.phases = PhaseClock(self.block)
        self._numbers[Word.WITNESS_PID] = 0
        self._numbers[Word.PID] = os.getpid()
        self._numbers[Word.PROCESS_START] = process_start(os.getpid())
        self.seen()

    def seen(self) -> None:
        """Record that the rank has just reported something."""
        self._numbers[Word.SEEN_AT] = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Time since the last `seen`."""
        return time.monotonic() - self._numbers[Word.SEEN_AT]

    def witness(self) -> Witness | None:
        """Prepare to show the activity of an unresponsive rank; None if it cannot be queried."""
        if self._folder is None:
            return None
        try:
            return Witness(self._folder, self._rank, self.block)
        except OSError:
            return None  # no room; `warning` reports it

    def take_save_request(self) -> bool:
        """Return whether the page received a checkpoint request since the last call."""
        asked = self._numbers[Word.SAVES_ASKED]
        if asked == self._numbers[Word.SAVES_TAKEN]:
            return False
        self._numbers[Word.SAVES_TAKEN] = asked
        return True

    def publish_info(self, labels: dict[str, str]) -> None:
        """Publish values of the labels of `metrics.INFO` that follow the rank.

        The first call publishes all labels; a later call changes some.

        Raises:
            OSError: There is no room.
        """
        self._labels |= labels
        self._publish(info_file(self._rank), to_json(self._labels).decode())

    def publish_progress(self, text: str) -> None:
        """Publish rank 0's progress, as JSON.

        Raises:
            OSError: There is no room.
        """
        self._publish(PROGRESS_FILE, text)

    def warnings_of_node(self) -> list[str]:
        """Return all warnings of the node's other processes; empty except on its first rank."""
        if self._folder is None or not self._is_first:
            return []
        try:
            text = (self._folder / _WARNINGS_FILE).read_text(encoding="utf-8")
        except OSError:  # no file before the first warning or after the end of the page
            return []
        return [line.rstrip() for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def trackers_of_node(self) -> tuple[TrackerRun, ...] | None:
        """Return the run in its trackers; None before, and except on the node's first rank."""
        if self._folder is None or not self._is_first:
            return None
        try:
            return _TrackerRuns.read(self._folder / _TRACKERS_FILE).runs
        except (OSError, ValidationError):  # no file before the first run or after the end
            return None

    def _publish(self, name: str, text: str) -> None:
        if self._folder is not None:
            replace_text(self._folder / name, text)

    def _open(self) -> Block:
        if self._folder is None:
            return Block.private()
        try:
            return Block.open(self._folder / block_file(self._rank))
        except OSError as error:
            self.warning = (
                f"{self._folder} cannot be written ({error.strerror or error}); training continues "
                f"without rank {self._rank} on the page of its node"
            )
            return Block.private()


def publish_warning(folder: Path, sentence: str) -> None:
    """Pass a warning of the page's or the trackers' process to the node's first rank.

    Raises:
        OSError: There is no room.
    """
    with (folder / _WARNINGS_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{sentence}\n")


def publish_trackers(folder: Path, runs: tuple[TrackerRun, ...]) -> None:
    """Pass the run in its trackers to the node's first rank.

    Raises:
        OSError: There is no room.
    """
    replace_text(folder / _TRACKERS_FILE, _TrackerRuns(runs=runs).to_json())


def block_file(rank: int) -> str:
    """Return the file name of a rank's block."""
    return f"rank-{rank}.slots"


def info_file(rank: int) -> str:
    """Return the file name of a rank's labels."""
    return f"rank-{rank}.json"

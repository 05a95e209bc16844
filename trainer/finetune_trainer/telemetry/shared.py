"""What a rank shares with the page of its node: a block of numbers, and two texts.

All are files of one folder in memory. Whoever starts a node's page makes the folder and says where
it is; where there is no page, everything stays in this process.
"""

import os
import time
from pathlib import Path

from pydantic_core import to_json

from finetune_trainer.config import ContractModel
from finetune_trainer.files import replace_text
from finetune_trainer.telemetry.phases import PhaseClock
from finetune_trainer.telemetry.processes import process_start
from finetune_trainer.telemetry.slots import Block, Word
from finetune_trainer.telemetry.witness import Witness

ENV_NODE_PAGE = "FINETUNE_NODE_PAGE"  # a supervisor's `NodePage`, as JSON, for its ranks
PROGRESS_FILE = "progress.json"
_WARNINGS_FILE = "warnings.txt"  # of the page's process, one a line


class NodePage(ContractModel):
    """The page of this node, as its ranks know it.

    Attributes:
        folder: where ranks leave what it shows; None where there is no page.
        url: where Prometheus finds it, from this machine.
        warning: why it is not where it should be, or nowhere.
        first_rank: the first of the node's ranks, which tells the warning.
        word: by which the page of rank 0's node knows the job's other nodes; None elsewhere.
    """

    folder: str | None = None
    url: str | None = None
    warning: str | None = None
    first_rank: int = 0
    word: str | None = None


class Shared:
    """One rank's part."""

    def __init__(self, page: NodePage, rank: int) -> None:
        """Open the rank's block, with the numbers of an earlier process of this rank, if any.

        Where it cannot be opened, `warning` says so, and the page goes without this rank.
        """
        self._is_first = page.first_rank == rank
        self.warning = page.warning if self._is_first else None
        self.url = page.url
        self._rank = rank
        self._folder = Path(page.folder) if page.folder is not None else None
        self.block = self._open()
        self._numbers = self.block.numbers
        self.phases = PhaseClock(self.block)  # while the page still takes the block for the old
        # process's, as the phase that it left running ends there
        self._numbers[Word.WITNESS_PID] = 0
        self._numbers[Word.PID] = os.getpid()
        self._numbers[Word.PROCESS_START] = process_start(os.getpid())
        self.seen()

    def seen(self) -> None:
        """Note that the rank reports something now."""
        self._numbers[Word.SEEN_AT] = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Time since the last `seen`."""
        return time.monotonic() - self._numbers[Word.SEEN_AT]

    def witness(self) -> Witness | None:
        """Be ready to tell what this rank does while it cannot; None where nobody may ask."""
        if self._folder is None:
            return None
        try:
            return Witness(self._folder, self._rank, self.block)
        except OSError:
            return None  # there is no room, as `warning` says

    def take_save_request(self) -> bool:
        """Return whether the page was asked for a checkpoint that no call has told of yet."""
        asked = self._numbers[Word.SAVES_ASKED]
        if asked == self._numbers[Word.SAVES_TAKEN]:
            return False
        self._numbers[Word.SAVES_TAKEN] = asked
        return True

    def tell_info(self, labels: dict[str, str]) -> None:
        """Publish the values of those labels of `metrics.INFO` that follow the rank.

        Raises:
            OSError: there is no room.
        """
        self._publish(info_file(self._rank), to_json(labels).decode())

    def tell_progress(self, text: str) -> None:
        """Publish rank 0's progress, as JSON.

        Raises:
            OSError: there is no room.
        """
        self._publish(PROGRESS_FILE, text)

    def warnings_of_node(self) -> list[str]:
        """Return what the page's process has told so far; only to the node's first rank."""
        if self._folder is None or not self._is_first:
            return []
        try:
            text = (self._folder / _WARNINGS_FILE).read_text(encoding="utf-8")
        except OSError:  # no file before the first warning, and none after the page has ended
            return []
        return [line.rstrip() for line in text.splitlines(keepends=True) if line.endswith("\n")]

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
                f"{self._folder} cannot be written ({error.strerror or error}); training goes on, "
                f"and rank {self._rank} is missing on the page of its node"
            )
            return Block.private()


def tell_warning(folder: Path, sentence: str) -> None:
    """Let the node's first rank warn of what the page's process has found.

    Raises:
        OSError: there is no room.
    """
    with (folder / _WARNINGS_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{sentence}\n")


def block_file(rank: int) -> str:
    """Return the name of a rank's block."""
    return f"rank-{rank}.slots"


def info_file(rank: int) -> str:
    """Return the name of the text of a rank's labels."""
    return f"rank-{rank}.json"

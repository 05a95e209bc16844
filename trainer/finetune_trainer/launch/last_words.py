"""Capture what a rank prints on stderr before C++ code ends its process without Python.

NCCL's watchdog is a C++ thread that aborts the process if a collective does not end or a peer is
gone. `rank_ends` creates a `LastWords` per rank, which forwards its stderr and searches the end of
it.
"""

import os
import re
import threading
from typing import IO

from finetune_trainer.config import FailureClass, Termination
from finetune_trainer.control import classify
from finetune_trainer.launch.rank_report import RankReport

_STDERR = 2
_TAIL_BYTES = 2**18  # includes the C++ frames of an abort
_READ_BYTES = 2**16
# Time to read the rest of an ended process's pipe, which its children may hold open.
_SECONDS_FOR_THE_REST = 1.0

# Patterns of an uncaught exception without torch's frames, and of a fatal line in torch's log.
_THROWN = re.compile(
    r"terminate called after throwing an instance of .*?what\(\): +(.*?)"
    r"(?=\nException raised from |\nframe #|\Z)",
    re.DOTALL,
)
_FATAL = re.compile(r"^\[rank\d+\]:\[F[^\]]*\] (.*)$", re.MULTILINE)
_PREFIX = re.compile(
    r"^(\[PG [^\]]*\] *)*((Process group|NCCL) watchdog thread terminated with exception: )?"
)


class LastWords:
    """Forwards all stderr output of one rank and remembers its end."""

    def __init__(self, pipe: IO[bytes]) -> None:
        """Start to read."""
        self._pipe = pipe
        self._tail = bytearray()
        self._reader = threading.Thread(target=self._read, name="stderr of a rank", daemon=True)
        self._reader.start()

    def text(self) -> str:
        """Return the end of the output, once the process is gone."""
        self._reader.join(_SECONDS_FOR_THE_REST)
        return bytes(self._tail).decode(errors="replace")

    def _read(self) -> None:
        has_reader = True
        with self._pipe:
            while part := self._pipe.read1(_READ_BYTES):  # type: ignore[attr-defined]
                self._tail += part
                del self._tail[:-_TAIL_BYTES]
                has_reader = has_reader and _forward(part)


def _forward(part: bytes) -> bool:
    """Write a part to our stderr; return False if it has no reader, for which no rank waits."""
    try:
        while part:
            part = part[os.write(_STDERR, part) :]
    except OSError:
        return False
    return True


def report_of_abort(rank: int, time: float, text: str) -> RankReport | None:
    """Return the report of a rank that died of SIGABRT; None if its stderr has no message.

    Args:
        rank: Number of the rank.
        time: When it ended, in seconds since the epoch.
        text: The end of its stderr.
    """
    found = [match[1] for match in _THROWN.finditer(text)] or _FATAL.findall(text)
    if not found:
        return None
    words = _PREFIX.sub("", found[-1].strip())
    verdict = classify(RuntimeError(words))
    message = verdict.message
    if verdict.failure_class is FailureClass.ERROR:
        first_line = words.partition("\n")[0].rstrip(".")
        message = f"rank {rank} was aborted ({first_line}); see its log"
    termination = Termination(
        failure_class=verdict.failure_class,
        exit_code=verdict.exit_code,
        message=message,
        rank=rank if verdict.is_own_fault else None,
    )
    is_collateral = verdict.is_collateral
    return RankReport(rank=rank, time=time, termination=termination, is_collateral=is_collateral)

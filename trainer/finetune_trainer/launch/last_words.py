"""What a rank says on stderr before C++ ends its process, where Python can report nothing.

NCCL's watchdog is a thread of C++ that aborts the process when a collective does not end or a peer
is gone. `rank_ends` reads each rank's stderr, forwards it at once, and searches its end here.
"""

import os
import re
import threading
from typing import IO

from finetune_trainer.config import FailureClass, Termination
from finetune_trainer.control import judge
from finetune_trainer.launch.rank_report import RankReport

_STDERR = 2
_KEPT_BYTES = 2**18  # an abort adds the frames of C++
_READ_BYTES = 2**16
# For what is still in the pipe of a process that has ended; its children may keep it open.
_SECONDS_FOR_THE_REST = 1.0

# An exception that nobody catches, without torch's frames; and a fatal line of torch's log.
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
    """The end of what one rank writes to stderr, all of which is passed on."""

    def __init__(self, pipe: IO[bytes]) -> None:
        """Begin to read."""
        self._pipe = pipe
        self._kept = bytearray()
        self._reader = threading.Thread(target=self._read, name="stderr of a rank", daemon=True)
        self._reader.start()

    def text(self) -> str:
        """Return the end, once the process is gone."""
        self._reader.join(_SECONDS_FOR_THE_REST)
        return bytes(self._kept).decode(errors="replace")

    def _read(self) -> None:
        is_heard = True
        with self._pipe:
            while part := self._pipe.read1(_READ_BYTES):  # type: ignore[attr-defined]
                self._kept += part
                del self._kept[:-_KEPT_BYTES]
                is_heard = is_heard and _pass_on(part)


def _pass_on(part: bytes) -> bool:
    """Write it to our own stderr; return whether anybody reads that. The rank must not wait."""
    try:
        while part:
            part = part[os.write(_STDERR, part) :]
    except OSError:
        return False
    return True


def report_of_abort(rank: int, time: float, text: str) -> RankReport | None:
    """Return what a rank that died of SIGABRT would have reported; None where it said nothing.

    Args:
        rank: Whose.
        time: When it ended, seconds since the epoch.
        text: The end of its stderr.
    """
    said = [found[1] for found in _THROWN.finditer(text)] or _FATAL.findall(text)
    if not said:
        return None
    words = _PREFIX.sub("", said[-1].strip())
    verdict = judge(RuntimeError(words))
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

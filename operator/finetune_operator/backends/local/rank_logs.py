"""Read the log of one rank of an attempt, as lines for people.

A rank appends events, one JSON line each, to a file in each start of the attempt. The output of its
node covers the time before the first event, and the traceback of a crash.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from finetune_operator.backends.local.layout import AttemptFolder
from finetune_operator.backends.local.records import AttemptRecord
from finetune_operator.errors import NoSuchRankError
from finetune_trainer.config.log_folders import journals

POLL_SECONDS = 0.2
_HEAD = ("time", "attempt", "rank", "event")


async def read_log(
    folder: AttemptFolder,
    record: AttemptRecord,
    rank: int,
    is_finished: Callable[[], bool] | None = None,
) -> AsyncIterator[str]:
    """Yield the lines of `rank`.

    Args:
        folder: The attempt's folder.
        record: The attempt.
        rank: Global rank.
        is_finished: Follow the log until this is true; None reads the existing lines.
    """
    world_size = record.nodes * record.processes_per_node
    if not 0 <= rank < world_size:
        ranks = "rank 0 alone" if world_size == 1 else f"ranks 0 to {world_size - 1}"
        raise NoSuchRankError(f"rank {rank} does not exist; attempt {record.attempt} has {ranks}")
    events: dict[Path, Tail] = {}
    output = Tail(folder.log(rank // record.processes_per_node))
    has_events = has_output = False
    while True:
        ended = (
            is_finished is None or is_finished()
        )  # before reading, so that the last lines are read
        for journal in journals(folder.run_dir, record.attempt, rank):
            for line in events.setdefault(journal, Tail(journal)).lines(ended):
                if (text := readable(line, record.attempt)) is not None:
                    has_events = True
                    yield text
        # The node's output is shown as long as the rank has no log of its own.
        if not has_events:
            for line in output.lines(ended):
                has_output = True
                yield line
        if ended:
            break
        await asyncio.sleep(POLL_SECONDS)
    if not has_events and not has_output:
        yield f"rank {rank} of attempt {record.attempt} has no output yet"


class Tail:
    """A growing file, read line by line from the position where the last read ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self, to_the_end: bool) -> Iterator[str]:
        """Yield the new lines; with `to_the_end` also an incomplete last line."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n") and not to_the_end:
                    return
                self._offset += len(line)
                yield line.decode(errors="replace").rstrip("\r\n")


def readable(line: str, attempt: int) -> str | None:
    """Return an event as `TIME EVENT key=value ...`, or None for another attempt's event."""
    try:
        event = json.loads(line)
    except ValueError:
        return line  # an incomplete line of a killed attempt, shown unchanged
    if not isinstance(event, dict) or event.get("attempt") != attempt:
        return None
    time = datetime.fromtimestamp(float(event.get("time", 0))).strftime("%H:%M:%S")
    fields = (f"{name}={_value(value)}" for name, value in event.items() if name not in _HEAD)
    return " ".join([time, str(event.get("event", "")), *fields])


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""Write rank-R.jsonl: the events of a rank in one start of an attempt, a JSON object per line."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic_core import to_json

Event = tuple[str, Mapping[str, object], float]
"""Name, fields, and time in seconds since the epoch."""


class Journal:
    """Append-only log of one rank.

    Every line has `time`, `attempt`, `rank` and `event`; the other keys belong to the event. Each
    write goes to the kernel at once, so no written line is lost if the process is killed.
    """

    def __init__(self, path: Path, *, attempt: int, rank: int, clock: Callable[[], float]) -> None:
        """Open `path` for appending; its folder is created."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._attempt = attempt
        self._rank = rank
        self._clock = clock
        self._file = path.open("ab")

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        """Append one event with the current time.

        Events after `close` are dropped, because a thread may report late.
        """
        self.write_all([(event, fields, self._clock())])

    def write_all(self, events: Iterable[Event]) -> None:
        """Append events in one write; events after `close` are dropped."""
        if not self._file.closed:
            self._file.write(b"".join([self._line(*event) for event in events]))
            self._file.flush()

    def _line(self, event: str, fields: Mapping[str, object], at: float) -> bytes:
        head = {"time": round(at, 3), "attempt": self._attempt, "rank": self._rank}
        line = to_json(
            {**head, "event": event, **fields},
            exclude_none=True,
            inf_nan_mode="strings",  # JSON has no literals for them
            serialize_unknown=True,
        )
        return line + b"\n"

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

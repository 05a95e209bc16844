"""Read the points of a run's curves from rank 0's journal.

Called outside of the ranks, by the reporter to Azure ML and by the trackers.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

CURVES = {
    "step": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "learning_rate": "train/learning_rate",
        "tokens_per_second": "train/tokens_per_second",
    },
    "evaluated": {"loss": "eval/loss"},
}
"""Names of the curves, by event and field of the journal."""


class Point(NamedTuple):
    """Values of one step in the journal.

    Attributes:
        number: Running number, by which sent points can be dropped.
        time: Seconds since the epoch.
        values: By the name of the curve; finite, because JSON has no other numbers.
    """

    number: int
    step: int
    time: float
    values: Mapping[str, float]


class JournalPoints:
    """Follows a growing journal.

    Attributes:
        starts: Number of this start of the attempt, once rank 0 has claimed its folders.
    """

    def __init__(self, journal: Path, offset: int | None = None) -> None:
        """Skip the first `offset` bytes, by default all existing ones: an earlier start's."""
        self.starts: int | None = None
        self._journal = journal
        self._offset = journal_size(journal) if offset is None else offset
        self._count = 0

    def read(self) -> list[tuple[str, Point]]:
        """Return the event and the point of each new complete line that has one."""
        try:
            file = self._journal.open("rb")
        except OSError:
            return []  # not written yet, or rank 0 itself reports the error of its disk
        with file:
            file.seek(self._offset)
            lines, _, rest = file.read().rpartition(b"\n")
            self._offset = file.tell() - len(rest)
        found = []
        for line in lines.splitlines():
            try:
                point = self._point(json.loads(line))
            except ValueError:
                continue  # truncated by a full disk
            if point is not None:
                found.append(point)
        return found

    def _point(self, event: object) -> tuple[str, Point] | None:
        match event:
            case {"event": "claimed", "generation": int(generation)}:
                self.starts = generation
            case {
                "event": str(kind),
                "step": int(step),
                "time": float(time),
                **fields,
            } if kind in CURVES:
                values = {curve: fields.get(field) for field, curve in CURVES[kind].items()}
                finite = {
                    curve: float(value)
                    for curve, value in values.items()
                    if isinstance(value, int | float) and math.isfinite(value)
                }
                self._count += 1
                return kind, Point(self._count, step, time, finite)
        return None


def journal_of(run_dir: Path) -> Path:
    """Return the path of rank 0's journal."""
    return run_dir / "logs" / "rank-0.jsonl"


def journal_size(journal: Path) -> int:
    """Return the bytes of a journal; 0 before it exists."""
    return journal.stat().st_size if journal.exists() else 0

"""Read the points of a run's curves from rank 0's journals of an attempt.

Called outside of the ranks, by the reporter to Azure ML and by the trackers.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from finetune_trainer.config import TrainConfig
from finetune_trainer.config.log_folders import generations, log_folder

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
    """Follows the growing journals of an attempt.

    Attributes:
        starts: Number of this start of the attempt, once rank 0 has claimed its folders.
    """

    def __init__(self, config: TrainConfig, after: int | None = None) -> None:
        """Skip generations up to `after`, by default all existing ones: they have ended."""
        self.starts: int | None = None
        self._run_dir, self._attempt = Path(config.run_dir), config.job.attempt
        self._after = newest_generation(config) if after is None else after
        self._offsets: dict[int, int] = {}
        self._count = 0

    def read(self) -> list[tuple[str, Point]]:
        """Return the event and the point of each new complete line that has one."""
        existing = generations(self._run_dir, self._attempt)
        return [point for one in existing if one > self._after for point in self._read(one)]

    def _read(self, generation: int) -> list[tuple[str, Point]]:
        try:
            journal = log_folder(self._run_dir, self._attempt, generation) / "rank-0.jsonl"
            file = journal.open("rb")
        except OSError:
            return []  # not written yet, or rank 0 itself reports the error of its disk
        with file:
            file.seek(self._offsets.get(generation, 0))
            lines, _, rest = file.read().rpartition(b"\n")
            self._offsets[generation] = file.tell() - len(rest)
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


def newest_generation(config: TrainConfig) -> int:
    """Return the newest generation of the attempt that has logs; 0 before the first."""
    return max(generations(Path(config.run_dir), config.job.attempt), default=0)

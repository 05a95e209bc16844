"""What reports have in common: spreads, limits, their table, the machine, the commit."""

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "benchmarks"


@dataclass(frozen=True)
class Limit:
    """The most a figure may be.

    Attributes:
        judged: Which of `median` and `max` has to keep to it.
    """

    most: float
    judged: str = "max"

    def __str__(self) -> str:
        """Return the table's cell."""
        return f"{self.judged} ≤ {self.most:g}"

    def verdict(self, figure: dict[str, float]) -> str:
        """Say whether the figure keeps to it."""
        return "met" if figure[self.judged] <= self.most else "**missed**"


def figures_table(
    measured: Mapping[str, Any],
    meaning: Mapping[str, str],
    limits: Mapping[str, Limit],
    *,
    digits: int = 3,
) -> list[str]:
    """Return the table of the figures in `meaning`, which says what each is."""
    lines = [
        "| figure | median | min | max | limit | | |",
        "|---|---:|---:|---:|---|---|---|",
    ]
    for name, text in meaning.items():
        figure, limit = measured.get(name), limits.get(name)
        if figure is None:
            continue  # an older run did not measure it
        cells = [f"{figure[key]:.{digits}f}" for key in ("median", "min", "max")]
        cells += ["", ""] if limit is None else [str(limit), limit.verdict(figure)]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {text} |")
    return lines


def spread(values: Sequence[float], *, digits: int = 4) -> dict[str, float]:
    """Return median, least and greatest."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def machine() -> dict[str, Any]:
    """Describe what the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.machine()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the commit of the checkout."""
    command = ("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

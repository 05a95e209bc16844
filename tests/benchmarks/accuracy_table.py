"""Errors of the forecast, recorded by the programs that measure them, and the table in the guide.

    python tests/benchmarks/accuracy_table.py    # write the table again

`make grids` and `make planner-accuracy … RECORD=1` record errors in docs/benchmarks/accuracy.json.
"""

import json
import re
import statistics
from collections.abc import Collection, Mapping
from typing import Any

from measured import FOLDER, ROOT

FILE = FOLDER / "accuracy.json"
GUIDE = ROOT / "docs" / "how-to" / "choose-hardware.md"
ROWS = {
    "trace": "memory: the trainer's step in fake tensors",
    "sharded": "memory: the same, sharded over 8 GPUs with selective recomputation",
    "published": "memory: published peaks of other programs with all settings known",
    "rates": "speed: published rates of other programs with all settings known",
}
_HEAD = "| compared with | cases | mean error | range |\n|---|---:|---:|---|\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(?:\|.*\n)*")


def record(name: str, errors: Collection[float]) -> None:
    """Record relative errors of the forecast under a name of `ROWS`, and write the table."""
    found = json.loads(FILE.read_text())
    found[name] = {
        "cases": len(errors),
        "mean": round(statistics.mean(map(abs, errors)), 6),
        "lowest": round(min(errors), 6),
        "highest": round(max(errors), 6),
    }
    FILE.write_text(json.dumps({key: found[key] for key in ROWS if key in found}, indent=2) + "\n")
    write()


def write() -> None:
    """Write the table into the guide."""
    text = GUIDE.read_text(encoding="utf-8")
    recorded = table(json.loads(FILE.read_text()))
    GUIDE.write_text(_TABLE.sub(lambda _: recorded, text), encoding="utf-8")


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of recorded errors."""
    lines = [
        f"| {ROWS[name]} | {one['cases']} | {one['mean']:.1%} | {one['lowest']:+.1%} to "
        f"{one['highest']:+.1%} |\n"
        for name, one in found.items()
    ]
    return _HEAD + "".join(lines).replace("%", " %")


if __name__ == "__main__":
    write()

"""How long the tests of each file take, and which of them `make test` runs.

    make test-all PYTEST_ARGS=--junitxml=REPORT
    python tests/benchmarks/times_by_file.py REPORT... [--out docs/benchmarks]

Writes tests.json, by which `run_order.py` starts the longest files first, and tests.md for people.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from measured import FOLDER, commit, machine

from run_order import QUICK, RUN

SHOWN_SECONDS = 5.0
"""Files that take less are one row of the page."""


@dataclass(frozen=True)
class Timed:
    """One test of a report."""

    file: str
    name: str
    seconds: float
    is_quick: bool


def main() -> None:
    """Read reports, then write tests.json and tests.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    roots = [ElementTree.parse(path).getroot() for path in options.reports]
    tests = [test for root in roots for test in read(root)]
    made = {
        "machine": machine(),
        "commit": commit(),
        "wall_seconds": round(sum(wall_seconds(root) for root in roots)),
        "files": by_file(tests),
    }
    (options.out / "tests.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    (options.out / "tests.md").write_text(page(made), encoding="utf-8")


def wall_seconds(root: ElementTree.Element) -> float:
    """Return how long the run of a report took."""
    return sum(float(suite.get("time", "0")) for suite in root.iter("testsuite"))


def read(root: ElementTree.Element) -> Iterator[Timed]:
    """Yield the tests of a JUnit report, with their fixtures' time."""
    for case in root.iter("testcase"):
        runs = {one.get("value") for one in case.iter("property") if one.get("name") == RUN}
        yield Timed(
            file=file_of(case.get("classname", "")),
            name=case.get("name", ""),
            seconds=float(case.get("time", "0")),
            is_quick=QUICK in runs,
        )


def file_of(class_name: str) -> str:
    """Return the file of `tests.unit.test_x` or `tests.unit.test_x.TestClass`."""
    parts = class_name.split(".")
    is_file = [part.startswith("test_") for part in parts]
    return "/".join(parts[: is_file.index(True) + 1]) + ".py"


def by_file(tests: Iterable[Timed]) -> dict[str, dict[str, Any]]:
    """Return the figures of each file, the one that takes longest first."""
    found: dict[str, list[Timed]] = {}
    for test in tests:
        found.setdefault(test.file, []).append(test)
    figures = {file: _figures(timed) for file, timed in found.items()}
    return dict(sorted(figures.items(), key=lambda item: (-item[1]["seconds"], item[0])))


def _figures(tests: list[Timed]) -> dict[str, Any]:
    quick = [test for test in tests if test.is_quick]
    return {
        "tests": len(tests),
        "seconds": round(sum(test.seconds for test in tests), 1),
        "longest_seconds": round(max(test.seconds for test in tests), 1),
        "quick_tests": len(quick),
        "quick_seconds": round(sum(test.seconds for test in quick), 1),
    }


def page(measured: dict[str, Any]) -> str:
    """Return the report for people, as Markdown."""
    where, files = measured["machine"], measured["files"]
    shown = {name: one for name, one in files.items() if one["seconds"] >= SHOWN_SECONDS}
    others = [one for name, one in files.items() if name not in shown]
    lines = [
        "# How long the tests take",
        "",
        "Written by `python tests/benchmarks/times_by_file.py` from the JUnit report of a "
        "`make test-all`; every figure is of that one run. Seconds are those of a worker, fixtures "
        "included. Workers share the cores, so a test takes longer than it would alone.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores; Python {where['python']}; commit "
        f"{measured['commit'][:12]}. The whole run took {measured['wall_seconds'] / 60:.0f} min.",
        "",
        "| file | tests | seconds | longest test | in `make test` | seconds there |",
        "|---|---:|---:|---:|---:|---:|",
        *(_row(f"`{name.removeprefix('tests/')}`", [one]) for name, one in shown.items()),
        _row(f"the other {len(others)} files", others),
        _row("all", list(files.values())),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, files: list[dict[str, Any]]) -> str:
    def total(key: str) -> float:
        found: float = sum(one[key] for one in files)
        return found

    longest = max((one["longest_seconds"] for one in files), default=0.0)
    cells = [f"{total('tests')}", f"{total('seconds'):.1f}", f"{longest:.1f}"]
    cells += [f"{total('quick_tests')}", f"{total('quick_seconds'):.1f}"]
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

"""Which run a test belongs to, and which files begin first where workers share the tests.

`conftest.py` calls it for each collection; CONTRIBUTING.md has the reasons.
"""

import json
import math
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

TIMES = Path(__file__).parents[1] / "docs" / "benchmarks" / "tests.json"
RUN, QUICK, FULL = "run", "make test", "make test-all"
ONLY_IN_FULL = ("full", "cluster", "e2e")
"""The marks that `make test` leaves out."""


class Item(Protocol):
    """What is asked of a test, which in a run is a `pytest.Item`."""

    @property
    def path(self) -> Path: ...

    def get_closest_marker(self, name: str) -> object | None: ...


ItemT = TypeVar("ItemT", bound=Item)


def run_of(item: Item) -> str:
    """Return the smallest run that a test is in."""
    return FULL if any(map(item.get_closest_marker, ONLY_IN_FULL)) else QUICK


def tell_run(item: pytest.Item) -> None:
    """Have a JUnit report say which run the test is in."""
    item.user_properties.append((RUN, run_of(item)))


def sort_files(items: list[ItemT], root: Path) -> None:
    """Put the file first that takes longest, and a new one before all others.

    The tests of a file stay together and in their order.
    """
    files = {item: item.path.relative_to(root).as_posix() for item in items}
    is_quick = all(run_of(item) == QUICK for item in items)
    seconds = measured_seconds(QUICK if is_quick else FULL)

    def place(item: ItemT) -> tuple[float, str]:
        file = files[item]
        return -seconds.get(file, math.inf), file

    items.sort(key=place)


def measured_seconds(run: str) -> dict[str, float]:
    """Return how long the tests that each file has in a run took; a new file is not in it."""
    measured = json.loads(TIMES.read_text(encoding="utf-8"))
    key = "quick_seconds" if run == QUICK else "seconds"
    return {file: one[key] for file, one in measured["files"].items()}

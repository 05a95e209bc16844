"""The order of the tests where workers share them, and the table of how long they take."""

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from times_by_file import by_file, page, read

from run_order import FULL, QUICK, measured_seconds, run_of, sort_files

ROOT = Path(__file__).parents[3]
REPORT = """
<testsuites><testsuite time="9.5">
  <testcase classname="tests.unit.test_a" name="test_one[1]" time="0.5">
    <properties><property name="run" value="make test" /></properties>
  </testcase>
  <testcase classname="tests.integration.test_b.TestB" name="test_two" time="6.5">
    <properties><property name="run" value="make test-all" /></properties>
  </testcase>
  <testcase classname="tests.integration.test_b" name="test_three" time="1.5">
    <properties><property name="run" value="make test" /></properties>
  </testcase>
</testsuite></testsuites>
"""


@dataclass(frozen=True, eq=False)
class Item:
    """What the order asks a test for."""

    path: Path
    name: str
    marks: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def item(file: str, name: str, *marks: str) -> Item:
    return Item(ROOT / file, name, marks)


def ordered(*items: Item) -> list[str]:
    made = list(items)
    sort_files(made, ROOT)
    return [one.name for one in made]


def longest_and_shortest() -> tuple[str, str]:
    seconds = measured_seconds(FULL)
    return max(seconds, key=seconds.__getitem__), min(seconds, key=seconds.__getitem__)


@pytest.mark.parametrize(
    ("marks", "run"),
    [((), QUICK), (("model",), QUICK), (("full",), FULL), (("cluster", "timeout"), FULL)],
)
def test_a_mark_says_which_run_a_test_is_in(marks: tuple[str, ...], run: str) -> None:
    assert run_of(item("tests/unit/test_a.py", "one", *marks)) == run


@pytest.mark.parametrize("marks", [(), ("full",)])
def test_a_new_file_comes_first_then_the_one_that_takes_longest(marks: tuple[str, ...]) -> None:
    longest, shortest = longest_and_shortest()
    assert ordered(
        item(shortest, "short"),
        item(longest, "long", *marks),
        item("tests/unit/test_new.py", "new"),
    ) == ["new", "long", "short"]


def test_the_tests_of_a_file_stay_together_in_their_order() -> None:
    assert ordered(
        item("tests/unit/test_a.py", "a1", "full"),
        item("tests/unit/test_b.py", "b1"),
        item("tests/unit/test_a.py", "a2"),
        item("tests/unit/test_b.py", "b2", "cluster"),
    ) == ["a1", "a2", "b1", "b2"]


def test_a_report_is_added_up_by_file_and_run() -> None:
    found = by_file(read(ElementTree.fromstring(REPORT)))
    assert list(found) == ["tests/integration/test_b.py", "tests/unit/test_a.py"]
    assert found["tests/integration/test_b.py"] == {
        "tests": 2,
        "seconds": 8.0,
        "longest_seconds": 6.5,
        "quick_tests": 1,
        "quick_seconds": 1.5,
    }


def test_the_page_has_a_row_of_each_file_that_takes_long() -> None:
    text = page(
        {
            "machine": {"cpu": "a CPU", "cores": 2, "python": "3.11.7"},
            "commit": "0" * 40,
            "wall_seconds": 600,
            "files": by_file(read(ElementTree.fromstring(REPORT))),
        }
    )
    assert text.splitlines()[-3:] == [
        "| `integration/test_b.py` | 2 | 8.0 | 6.5 | 1 | 1.5 |",
        "| the other 1 files | 1 | 0.5 | 0.5 | 1 | 0.5 |",
        "| all | 3 | 8.5 | 6.5 | 2 | 2.0 |",
    ]

"""Run the faults of the table and count which were right: `make chaos` and `make chaos-ci`.

    PYTHONPATH=tests python tests/support/chaos/chaos_run.py [--starred] [--place PLACE]
        [--rounds 3] [--write]

A case that a test skips is counted as not run, with the reason. `--write` records the runs in
docs/benchmarks/reliability.json and writes docs/reliability.md.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.chaos.case import Case, Place
from support.chaos.page import PAGE, RECORDED, page, recorded
from support.chaos.table import CASES, RECORD, test_of


@dataclass(eq=False)
class Runs:
    """Collects the outcome of each test; a plugin of pytest.

    Attributes:
        results: Outcome of each run by the test's id: `passed`, `failed`, or why it was skipped.
        outcomes: What the newest run of a test has recorded.
    """

    results: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    outcomes: dict[str, Any] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a result; a failed setup or teardown is a failure, too."""
        if report.skipped:
            assert isinstance(report.longrepr, tuple)
            reason = report.longrepr[-1].removeprefix("Skipped: ")
            self.results[report.nodeid].append(reason)
        elif report.when == "call" or report.failed:
            self.results[report.nodeid].append("passed" if report.passed else "failed")
        properties = dict(report.user_properties)
        if RECORD in properties:
            self.outcomes[report.nodeid] = properties[RECORD]

    def of(self, case: Case) -> tuple[int, int, str]:
        """Return how many runs of a case were right, how many ran, and why others did not."""
        name = test_of(case)
        mine = [
            results
            for test, results in self.results.items()
            if test == name or (case.shown_by and test.startswith((f"{name}[", f"{name}::")))
        ]
        if case.not_run or not mine:
            return 0, 0, case.not_run or "no test has run"
        rounds = [set(one) for one in zip(*mine, strict=True)]
        ran = [one for one in rounds if one & {"passed", "failed"}]
        right = sum("failed" not in one for one in ran)
        return right, len(ran), "" if ran else sorted(rounds[0])[0]


def main() -> int:
    """Run the cases; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starred", action="store_true", help="the starred faults alone")
    parser.add_argument("--place", choices=list(Place), help="the faults of a place alone")
    parser.add_argument("--rounds", type=int, default=3, help="how often each fault is caused")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    cases = [one for one in CASES if one.is_starred or not options.starred]
    cases = [one for one in cases if options.place in (None, one.place)]
    runs = Runs()
    tests = sorted({test_of(one) for one in cases if not one.not_run})
    for _ in range(options.rounds):
        pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *tests], plugins=[runs])
    if options.write:
        write(cases, runs)
    return print_totals(cases, runs, is_short=options.starred)


def write(cases: Sequence[Case], runs: Runs) -> None:
    """Record the cases that ran, and write the page; earlier runs of others stay."""
    record = recorded() if RECORDED.exists() else {}
    for case in cases:
        right, ran, _ = runs.of(case)
        if ran:
            outcome = runs.outcomes.get(test_of(case))
            record[case.slug] = {"right": right, "runs": ran, "outcome": outcome}
    record = {one.slug: record[one.slug] for one in CASES if one.slug in record}
    RECORDED.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


def print_totals(cases: Sequence[Case], runs: Runs, *, is_short: bool) -> int:
    """Print wrong cases and totals; return the exit code."""
    found = {case: runs.of(case) for case in cases}
    for case, (right, ran, _) in found.items():
        if right < ran:
            print(f"wrong: {case.fault} ({right} of {ran}): {test_of(case)}")
    right = sum(one for one, _, _ in found.values())
    ran = sum(one for _, one, _ in found.values())
    reasons = Counter(reason for _, _, reason in found.values() if reason)
    missing = "; ".join(f"{count} not run: {reason}" for reason, count in reasons.items())
    if is_short:
        print(f"{right} right, {missing or '0 not run'}")
    else:
        print(missing or "all cases have run")
        print(f"{right} of {ran} right")
    return int(right < ran or not ran)


if __name__ == "__main__":
    sys.exit(main())

"""The table of faults is sound, and its page is what the record of the last runs makes."""

import ast
from pathlib import Path

import pytest

from finetune_operator.api.v1alpha1.status import JobPhase
from support.chaos.case import Case, Place
from support.chaos.page import PAGE, page, recorded
from support.chaos.table import CASES

ROOT = Path(__file__).parents[2]
ELSEWHERE = [one for one in CASES if one.shown_by]


def test_each_fault_is_named_once() -> None:
    assert len({one.slug for one in CASES}) == len(CASES)


def test_each_fault_has_one_cause_and_words_for_the_user() -> None:
    for case in CASES:
        assert bool(case.inject) != bool(case.shown_by), case.fault
        assert case.truth.words, case.fault
        assert (case.truth.phase is JobPhase.FAILED) == bool(case.truth.final), case.fault


@pytest.mark.parametrize("case", ELSEWHERE, ids=lambda case: case.slug)
def test_a_fault_that_another_test_causes_names_a_test_of_its_place(case: Case) -> None:
    file, _, name = case.shown_by.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    assert not name or name in names
    assert (case.place is Place.NODE) == file.startswith("tests/e2e/")


NEW_REASONS = (
    "Completing", "ControlPlaneCutOff", "Evicted", "InitContainerRunning", "KueueNotInstalled",
    "NodeLost", "NodeNotResponding", "NotResponding", "NotStarted", "PodNotStarted",
    "PodsNotCreated", "ProgressUnknown", "Rejected", "SchedulerNotResponding", "ServiceSilent",
)  # fmt: skip
"""Reasons and classes that have an alert, or that the runbook names as reasons without an alert."""


@pytest.mark.parametrize("reason", NEW_REASONS)
def test_a_reason_is_in_the_runbook_and_in_the_table(reason: str) -> None:
    assert f"`{reason}`" in (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    assert any(reason in (one.truth.reason, one.truth.failure) for one in CASES)


def test_the_page_is_what_the_record_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(recorded()), "run: make chaos"

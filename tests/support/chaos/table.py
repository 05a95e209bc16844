"""All faults with their truth, as data."""

from support.chaos import azureml_faults, kubernetes_faults, kubernetes_verdicts, shown_elsewhere
from support.chaos.case import Case

RECORD = "chaos"
"""Property of a test's report that holds its outcome."""

VIRTUAL_TEST = "tests/chaos/test_virtual.py::test_the_status_names_the_fault"

CASES: tuple[Case, ...] = (
    *kubernetes_faults.CASES,
    *kubernetes_verdicts.CASES,
    *azureml_faults.CASES,
    *shown_elsewhere.CASES,
)


def test_of(case: Case) -> str:
    """Return the test, or the tests, of a case, as pytest names them."""
    return case.shown_by or f"{VIRTUAL_TEST}[{case.slug}]"

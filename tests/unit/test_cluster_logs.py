"""Which attempt `ftctl logs` means; what it reads of a cluster is the end-to-end tests' part."""

import pytest

from finetune_operator.api.v1alpha1.status import AttemptStatus, FineTuneJobStatus
from finetune_operator.cli.cluster_logs import attempt_number
from finetune_operator.errors import FineTuneError


def status(*ends: str | None) -> FineTuneJobStatus:
    """Return a status whose attempts ended so; None is one that runs."""
    attempts = [AttemptStatus(number=at, failure_class=end) for at, end in enumerate(ends, 1)]
    return FineTuneJobStatus(attempt=len(ends), attempts=attempts)


@pytest.mark.parametrize(
    ("ends", "previous", "number"),
    [
        pytest.param([None], False, 1, id="the one that runs"),
        pytest.param(["Error", None], False, 2, id="the newest"),
        pytest.param(["Error", None], True, 1, id="the one before"),
        pytest.param(["Error", "Error"], True, 1, id="the one before one that failed"),
        pytest.param(["DataError"], True, 1, id="the only one, as it failed"),
    ],
)
def test_previous_is_the_attempt_before_or_the_only_one_that_failed(
    ends: list[str | None], previous: bool, number: int
) -> None:
    assert attempt_number("x", status(*ends), previous=previous) == number


@pytest.mark.parametrize("end", [None, "Completed"])
def test_there_is_none_before_an_only_attempt_that_did_not_fail(end: str | None) -> None:
    with pytest.raises(FineTuneError, match="x has no attempt before the first; leave out"):
        attempt_number("x", status(end), previous=True)

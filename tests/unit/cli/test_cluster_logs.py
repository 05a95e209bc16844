"""Which attempt `ftctl logs` means, and how it asks a backend for its log.

What it reads of a cluster is the end-to-end tests' part.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from fake_service import RemoteService
from finetune_operator.api.v1alpha1.status import AttemptStatus, FineTuneJobStatus
from finetune_operator.backends.base import Attempt, BackendContext
from finetune_operator.cli.cluster_logs import RankLog, attempt_number, lines_of
from finetune_operator.errors import FineTuneError
from finetune_operator.planner.plan import make_plan
from remote_backend.backend import RemoteBackend
from remote_backend.service import RemoteRun
from support.api.builders import job
from support.kernel.virtual_time import run


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


class Wordy(RemoteService):
    """A service that keeps two lines of each run."""

    async def get(self, name: str) -> RemoteRun | None:
        run = await super().get(name)
        return run and replace(run, lines=("step 1", "step 2"))


def test_a_backend_behind_a_service_is_started_for_its_logs_and_closed_after_them() -> None:
    async def work() -> None:
        service = Wordy()
        backend = RemoteBackend(BackendContext(Path()), service)
        made = job().model_copy(update={"status": status(None)})
        request = backend.render(make_plan(made), Attempt(1))
        (only,) = request.objects
        await service.create(request.name, only["tags"])
        wanted = RankLog(0, previous=False, follow=False)
        assert [one async for one in lines_of(backend, made, wanted)] == ["step 1", "step 2"]
        num_requests = len(service.requests)
        await asyncio.sleep(60)
        assert len(service.requests) == num_requests

    run(work())

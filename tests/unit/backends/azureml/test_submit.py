"""How Azure ML is asked, on its stand-in: to create jobs and end them, and what refusals mean."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from azureml_service import WORKSPACE, SeenJob, ServiceClient
from finetune_operator.backends.azureml.names import UID_TAG, JobProfile
from finetune_operator.backends.azureml.render import render
from finetune_operator.backends.azureml.sdk import RefusedError
from finetune_operator.backends.azureml.states import AttemptView
from finetune_operator.backends.azureml.submit import Stops, handle_of, submit
from finetune_operator.backends.azureml.workspace_client import (
    REQUESTS_PER_SECOND,
    Azure,
    Workspace,
)
from finetune_operator.backends.base import Attempt, AttemptPhase, AttemptRef
from finetune_operator.backends.budget import Priority
from finetune_operator.errors import AlreadyOwnedError, BackendError, TransientError
from finetune_operator.kube.api_errors import NotLeadingError
from finetune_operator.kube.cache import Key
from finetune_operator.planner.plan import make_plan
from finetune_operator.testing.suite import Lent
from finetune_trainer.config import STOP_TAG, StopRequest
from support.api.builders import job as made_job
from support.azureml.azureml_cases import JOB, profile

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*experimental")

T = TypeVar("T")

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module", autouse=True)
def ignored_cancels(stand_in_of_module: ServiceClient) -> None:
    stand_in_of_module.settings(cancel="ignored")


@pytest.fixture
def uid(stand_in: ServiceClient) -> str:
    """Of a job that the service does not have yet."""
    return f"u{len(stand_in.jobs())}"


@asynccontextmanager
async def opened(client_id: str | None = None) -> AsyncIterator[tuple[Workspace, Lent]]:
    """Yield a workspace that may be asked often, and what its backend was lent."""
    azure, lent = Azure({**os.environ, REQUESTS_PER_SECOND: "100"}), Lent()
    azure.start(lent)
    try:
        yield azure.workspace(WORKSPACE, client_id), lent
    finally:
        azure.close()


def rendered(uid: str, **changes: Any) -> dict[str, Any]:
    """Return attempt 1 of a job with that uid, as the CLI takes it."""
    job, spec = made_job(**{**JOB, "metadata__uid": uid, **changes}), profile()
    assert spec.azureml is not None
    named = JobProfile("default", spec, spec.azureml)
    (made,) = render(make_plan(job), named, Attempt(1)).objects
    return dict(made)


def kinds(stand_in: ServiceClient) -> list[str]:
    """Return what was asked for, besides tokens."""
    return [one.kind for one in stand_in.requests() if one.kind != "token"]


def the_job(stand_in: ServiceClient, uid: str) -> SeenJob:
    return stand_in.job(f"tiny-{uid}-1")


def test_a_submit_is_one_get_and_one_put_and_again_one_get(
    stand_in: ServiceClient, uid: str
) -> None:
    async def work() -> None:
        async with opened() as (workspace, _):
            made = rendered(uid)
            first = await submit(workspace, made)
            assert kinds(stand_in) == ["job.get", "job.put"]
            again = await submit(workspace, made)
            assert kinds(stand_in) == ["job.get", "job.put", "job.get"]
            assert handle_of(workspace, again) == handle_of(workspace, first)
            assert (first.name, first.status) == (f"tiny-{uid}-1", "NotStarted")
            assert (first.tags, first.nodes) == (made["tags"], 1)
            assert first.outputs["output"] == made["outputs"]["output"]["path"]

    asyncio.run(work())


def test_a_job_of_somebody_else_is_refused_and_left_alone(
    stand_in: ServiceClient, uid: str
) -> None:
    async def work() -> None:
        async with opened() as (workspace, _):
            made = rendered(uid)
            await submit(workspace, {**made, "tags": {**made["tags"], UID_TAG: "theirs"}})
            with pytest.raises(AlreadyOwnedError, match="belongs to theirs; rename"):
                await submit(workspace, made)

    asyncio.run(work())


def test_our_own_job_is_adopted_where_another_process_was_faster_with_another_profile(
    stand_in: ServiceClient, uid: str
) -> None:
    async def work() -> None:
        async with opened() as (workspace, _):
            first = await submit(workspace, rendered(uid))
            stand_in.fault("job.get", status=404, times=1)
            assert await submit(workspace, rendered(uid, training__maxSteps=11)) == first
            assert kinds(stand_in)[2:] == ["job.get", "job.put", "job.get"]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("fault", "error", "message", "retry_after", "is_made"),
    [
        pytest.param({"status": 429, "retry_after": 0.5}, TransientError, "Azure ML reports", 0.5,
                     False, id="throttled"),
        pytest.param({"status": 503}, TransientError, "Azure ML reports", None, False, id="before"),
        pytest.param({"status": 503, "is_carried_out": True}, TransientError, "Azure ML reports",
                     None, True, id="503 after it was carried out"),
        pytest.param({"is_lost": True}, TransientError, "does not respond", None, False, id="lost"),
        pytest.param({"is_lost": True, "is_carried_out": True}, TransientError, "does not respond",
                     None, True, id="the answer is lost"),
        pytest.param({"status": 400}, RefusedError, "Azure ML reports", None, False, id="bad"),
        pytest.param({"status": 401}, RefusedError, "Azure ML reports", None, False, id="nobody"),
        pytest.param({"status": 403}, RefusedError, "Azure ML reports", None, False, id="no right"),
    ],
)  # fmt: skip
def test_what_a_put_meets_is_told_once_and_the_next_submit_makes_one_job(
    stand_in: ServiceClient,
    uid: str,
    fault: dict[str, Any],
    error: type[BackendError],
    message: str,
    retry_after: float | None,
    is_made: bool,
) -> None:
    async def work() -> None:
        async with opened() as (workspace, _):
            stand_in.fault("job.put", times=1, **fault)
            with pytest.raises(error, match=message) as raised:
                await submit(workspace, rendered(uid))
            assert type(raised.value) is error
            assert raised.value.retry_after == retry_after
            assert kinds(stand_in).count("job.put") == 1
            names = [one.name for one in stand_in.jobs()]
            assert (f"tiny-{uid}-1" in names) is is_made
            assert await submit(workspace, rendered(uid))
            assert len(stand_in.jobs()) == len(names) + (not is_made)

    asyncio.run(work())


def test_what_the_service_asks_to_wait_is_waited_by_all_requests(
    stand_in: ServiceClient, uid: str
) -> None:
    async def work() -> None:
        async with opened() as (workspace, _):
            stand_in.fault("job.get", status=429, retry_after=1.0, times=1)
            with pytest.raises(TransientError):
                await workspace.job("any")
            await submit(workspace, rendered(uid))
            throttled, *later = [one.time for one in stand_in.requests() if one.kind != "token"]
            assert min(later) - throttled >= 1.0

    asyncio.run(work())


def test_who_leads_no_more_sends_no_put_and_no_cancel(stand_in: ServiceClient, uid: str) -> None:
    async def work() -> None:
        async with opened() as (workspace, lent):
            lent.may_write = False
            with pytest.raises(NotLeadingError):
                await submit(workspace, rendered(uid))
            with pytest.raises(NotLeadingError):
                await workspace.cancel("any")
            with pytest.raises(NotLeadingError):
                await workspace.post("/mlflow/v2.0{ws}/api/2.0/mlflow/runs/set-tag", {})
            assert set(kinds(stand_in)) <= {"job.get", "workspace.get", "discovery.get"}

    asyncio.run(work())


def test_after_close_nothing_is_sent(stand_in: ServiceClient) -> None:
    async def work() -> None:
        async with opened() as (workspace, _):
            assert await workspace.job("none") is None
        asked = len(stand_in.requests())
        with pytest.raises(TransientError, match="the backend is closed"):
            await workspace.job("none")
        assert len(stand_in.requests()) == asked

    asyncio.run(work())


def test_each_profile_asks_as_its_own_identity(stand_in: ServiceClient, uid: str) -> None:
    other = "44444444-4444-4444-4444-444444444444"

    async def work() -> None:
        async with opened(other) as (workspace, _):
            await submit(workspace, rendered(uid))
        assert the_job(stand_in, uid).client == other

    asyncio.run(work())


def test_a_token_that_is_refused_is_replaced(stand_in: ServiceClient, uid: str) -> None:
    async def work() -> None:
        async with opened() as (workspace, _):
            assert await workspace.job("none") is None
            stand_in.tokens(revoke=True)
            with pytest.raises(RefusedError) as error:
                await submit(workspace, rendered(uid))
            assert error.value.status == 401
            assert await submit(workspace, rendered(uid))

    asyncio.run(work())


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AZURE_FEDERATED_TOKEN_FILE", "/nowhere", "No such file"),
        ("AZURE_TENANT_ID", "", "set without AZURE_CLIENT_ID and AZURE_TENANT_ID"),
    ],
)
def test_an_identity_that_is_not_whole_is_a_sentence(
    stand_in: ServiceClient,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(variable, value)

    async def work() -> None:
        async with opened() as (workspace, _):
            with pytest.raises(RefusedError, match=message):
                await workspace.job("none")

    asyncio.run(work())
    assert stand_in.requests() == []


def test_the_signed_url_of_a_log_is_in_no_error(stand_in: ServiceClient) -> None:
    async def work() -> None:
        async with opened() as (workspace, _):
            with pytest.raises(TransientError) as error:
                await workspace.get_range("https://127.0.0.1:1/log?sig=secret", 0, 10)
            shown: BaseException | None = error.value
            while shown is not None:
                assert "secret" not in repr(shown)
                shown = shown.__cause__

    asyncio.run(work())


def test_a_pace_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{REQUESTS_PER_SECOND} is 0"):
        Azure({REQUESTS_PER_SECOND: "0"})


RUNNING = AttemptView("Running", NOW, AttemptPhase.RUNNING)
LISTENING = replace(RUNNING, is_listening=True)
TAG, CANCEL = "mlflow.runs.set-tag", "job.cancel"


class Stopped:
    """An attempt that was submitted, as `Stops` ends it."""

    def __init__(self, stand_in: ServiceClient, workspace: Workspace, ref: AttemptRef) -> None:
        self.stand_in, self.workspace, self.ref = stand_in, workspace, ref
        self.stops = Stops()

    async def stop(
        self, look: AttemptView, left: float = 0.0, later: float = 0.0
    ) -> tuple[bool, list[str]]:
        """Stop it with so many seconds left; return the answer, and what was changed for it."""
        now = NOW + timedelta(seconds=later)
        self.stand_in.requests(forget=True)
        until = now + timedelta(seconds=left)
        answer = await self.stops.stop(self.workspace, self.ref, look, until, now)
        return answer, [kind for kind in kinds(self.stand_in) if kind in (TAG, CANCEL)]


@asynccontextmanager
async def submitted(stand_in: ServiceClient, uid: str) -> AsyncIterator[Stopped]:
    async with opened() as (workspace, _):
        handle = handle_of(workspace, await submit(workspace, rendered(uid)))
        yield Stopped(stand_in, workspace, AttemptRef(Key("default", "tiny"), uid, 1, handle))


def test_a_trainer_that_listens_is_told_by_its_tag_and_cancelled_when_its_time_is_up(
    stand_in: ServiceClient, uid: str
) -> None:
    async def work() -> None:
        async with submitted(stand_in, uid) as attempt:
            assert await attempt.stop(LISTENING, 60.0) == (True, [TAG])
            said = StopRequest.model_validate_json(the_job(stand_in, uid).tags[STOP_TAG])
            assert said.until == NOW + timedelta(seconds=60)
            for _ in range(3):
                assert await attempt.stop(LISTENING, 60.0) == (False, [])
            assert await attempt.stop(LISTENING, 5.0) == (True, [TAG])  # sooner than was said
            assert await attempt.stop(LISTENING, 0.0) == (False, [CANCEL])
            assert await attempt.stop(LISTENING, 0.0) == (False, [])

    asyncio.run(work())


def test_who_does_not_listen_is_cancelled_at_once_and_its_tag_says_that_it_was_us(
    stand_in: ServiceClient, uid: str
) -> None:
    async def work() -> None:
        async with submitted(stand_in, uid) as attempt:
            assert await attempt.stop(RUNNING, 60.0) == (False, [TAG, CANCEL])
            assert STOP_TAG in the_job(stand_in, uid).tags
            assert await attempt.stop(RUNNING, 60.0, later=60.0) == (False, [])
            assert await attempt.stop(RUNNING, later=600.0) == (False, [CANCEL])  # no effect

    asyncio.run(work())


def test_a_process_that_starts_anew_goes_on_where_the_one_before_ended(
    stand_in: ServiceClient, uid: str
) -> None:
    told = replace(LISTENING, stop_until=NOW + timedelta(seconds=60))

    async def work() -> None:
        async with submitted(stand_in, uid) as attempt:
            assert await attempt.stop(told, 60.0) == (True, [])
            assert await attempt.stop(told, 0.0) == (False, [CANCEL])

    asyncio.run(work())


@pytest.mark.parametrize("state", ["CancelRequested", "Finalizing", "Completed", "Canceled", ""])
def test_what_ends_by_itself_is_not_cancelled(
    stand_in: ServiceClient, uid: str, state: str
) -> None:
    async def work() -> None:
        async with submitted(stand_in, uid) as attempt:
            assert await attempt.stop(replace(RUNNING, state=state)) == (False, [])

    asyncio.run(work())


def test_a_cancel_that_comes_too_late_has_done_its_work(stand_in: ServiceClient, uid: str) -> None:
    async def work() -> None:
        async with submitted(stand_in, uid) as attempt:
            stand_in.set_state(f"tiny-{uid}-1", "Finalizing")
            assert await attempt.stop(RUNNING) == (False, [TAG, CANCEL])

    asyncio.run(work())


def test_a_cancel_that_is_refused_while_the_job_runs_is_an_error_and_asked_for_again(
    stand_in: ServiceClient, uid: str
) -> None:
    async def work() -> None:
        async with submitted(stand_in, uid) as attempt:
            stand_in.set_state(f"tiny-{uid}-1", "Running")
            for status in (400, 403):
                stand_in.fault("job.cancel", status=status, times=1)
                with pytest.raises(RefusedError):
                    await attempt.stop(RUNNING)
            assert await attempt.stop(RUNNING) == (False, [CANCEL])

    asyncio.run(work())


def test_a_tag_that_is_refused_delays_no_cancel_that_is_due(
    stand_in: ServiceClient, uid: str
) -> None:
    async def work() -> None:
        async with submitted(stand_in, uid) as attempt:
            stand_in.fault(TAG, times=1, status=403)
            assert await attempt.stop(RUNNING) == (False, [TAG, CANCEL])

    asyncio.run(work())


@pytest.mark.parametrize("fault", [{"status": 503}, {"is_lost": True}])
def test_a_tag_that_may_be_set_later_delays_a_cancel_by_a_minute_at_most(
    stand_in: ServiceClient, uid: str, fault: dict[str, Any]
) -> None:
    async def work() -> None:
        async with submitted(stand_in, uid) as attempt:
            stand_in.fault(TAG, times=2, **fault)
            for left in (0.0, -59.0):
                with pytest.raises(TransientError):
                    await attempt.stop(RUNNING, left)
            assert await attempt.stop(RUNNING, -59.0) == (False, [TAG, CANCEL])
        async with submitted(stand_in, f"{uid}x") as attempt:
            stand_in.fault(TAG, times=1, **fault)
            assert await attempt.stop(RUNNING, -60.0) == (False, [TAG, CANCEL])

    asyncio.run(work())


def test_a_trainer_that_could_not_be_told_is_told_again_or_cancelled_where_that_is_refused(
    stand_in: ServiceClient, uid: str
) -> None:
    async def work() -> None:
        async with submitted(stand_in, uid) as attempt:
            stand_in.fault(TAG, status=503, times=1)
            with pytest.raises(TransientError):
                await attempt.stop(LISTENING, 60.0)
            stand_in.fault(TAG, status=403, times=1)
            assert await attempt.stop(LISTENING, 60.0) == (False, [TAG, CANCEL])

    asyncio.run(work())


def test_no_request_has_its_turn_before_the_sdk_is_there(
    stand_in: ServiceClient,
) -> None:
    begun = time.monotonic()

    class Slow(Lent):
        async def run_blocking(self, call: Callable[[], T], seconds: float) -> T:
            if time.monotonic() < begun + 1.0:  # its first calls are as slow as an import
                await asyncio.sleep(1.0)
            return await super().run_blocking(call, seconds)

    async def work() -> None:
        azure = Azure({**os.environ, REQUESTS_PER_SECOND: "10"})
        azure.start(Slow())
        workspace = azure.workspace(WORKSPACE, None)
        await asyncio.gather(*(workspace.job("none", Priority.WRITE) for _ in range(6)))
        times = [one.time for one in stand_in.requests("job.get")]
        assert times[-1] - times[0] >= 0.4

    asyncio.run(work())
